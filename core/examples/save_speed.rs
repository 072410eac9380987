//! How long until a save is durable, beside one raw direct write and fsync of the same bytes.
//!
//! ```text
//! cargo run --release --example save_speed -- DIRECTORY [slot MiB [ring MiB [queue depth [rounds]]]]
//! ```
//!
//! Both write a fresh file whose blocks were reserved first; between two files the disk rests,
//! since freed blocks slow the next writer down on file systems mounted with `discard`.
#![expect(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a measurement prints, and stops where it cannot go on"
)]

#[path = "support/mod.rs"]
mod support;

use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use stepwell_core::Result;
use stepwell_core::io::{Disk, Engine, NoReclaimer, open_disk};
use stepwell_core::save::{SaveStats, prepare};
use stepwell_core::staging::StagingPool;
use stepwell_core::sys::Buffer;
use support::{MIB, items, large, middle, small, sources};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let root = PathBuf::from(arguments.next().unwrap_or_else(|| ".".into())).join(".save_speed");
    let mut number = |default: usize| arguments.next().map_or(default, |text| text.parse().unwrap());
    let (slot, ring, depth, rounds) = (number(8), number(1200), number(4), number(5));
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    std::fs::create_dir_all(&root).unwrap();
    let disk = open_disk(&root, Engine::Auto)?;
    println!("{:?}", disk.choice());
    println!(
        "slots of {slot} MiB, ring of {ring} MiB, {depth} in flight, {rounds} rounds; seconds, median (fastest)"
    );
    let pool = StagingPool::new(ring * MIB, slot * MIB)?;
    let mut buffer = Buffer::alone(16 * MIB)?;
    for (i, byte) in buffer.iter_mut().enumerate() {
        *byte = i as u8;
    }
    for (name, sizes) in [("20 000 leaves", small()), ("1 GiB", large(1024)), ("3 GiB", large(3072))] {
        let sources = sources(&sizes);
        let bytes: usize = sizes.iter().sum();
        let (mut raws, mut totals, mut blocked) = (Vec::new(), Vec::new(), Vec::new());
        let mut last = SaveStats::default();
        for _ in 0..rounds {
            raws.push(raw(&root.join("raw"), bytes, &buffer));
            let (items, mut options) = items(&sources, threads)?;
            options.queue_depth = depth;
            let started = Instant::now();
            let (capture, flush) = prepare(items, &pool, options)?;
            let progress = flush.progress();
            let time = std::thread::scope(|scope| -> Result<_> {
                let flushed = scope.spawn(|| flush.run(&*disk, &disk.open_dir(&root)?, &mut NoReclaimer));
                let captured = Instant::now();
                capture.run()?;
                let captured = captured.elapsed().as_secs_f64();
                flushed.join().unwrap()?;
                Ok((started.elapsed().as_secs_f64(), captured))
            })?;
            totals.push(time.0);
            blocked.push(time.1);
            last = progress.snapshot();
            std::fs::remove_dir_all(root.join("i0")).unwrap();
            rest(&*disk, &root)?;
        }
        let (raw, total, blocked) = (middle(raws), middle(totals), middle(blocked));
        println!(
            "{name} ({bytes} bytes): raw {:.3} ({:.3}) = {:.2} GB/s; durable {:.3} ({:.3}) = {:.2} GB/s, {:.2} x; blocked {:.4}",
            raw.0,
            raw.1,
            bytes as f64 / raw.0 / 1e9,
            total.0,
            total.1,
            bytes as f64 / total.0 / 1e9,
            total.0 / raw.0,
            blocked.0,
        );
        println!("    the last one: {last:?}");
    }
    std::fs::remove_dir_all(&root).unwrap();
    Ok(())
}

fn rest(disk: &dyn Disk, root: &Path) -> Result<()> {
    disk.open_dir(root)?.sync()?;
    std::thread::sleep(Duration::from_millis(1500));
    Ok(())
}

/// One thread, 16 MiB at a time.
fn raw(path: &Path, bytes: usize, buffer: &Buffer) -> f64 {
    let started = Instant::now();
    let file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .unwrap();
    let bytes = bytes.next_multiple_of(4096);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes as u64).unwrap();
    for at in (0..bytes).step_by(buffer.len()) {
        file.write_all_at(&buffer[..buffer.len().min(bytes - at)], at as u64).unwrap();
    }
    file.sync_all().unwrap();
    let seconds = started.elapsed().as_secs_f64();
    drop(file);
    std::fs::remove_file(path).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    seconds
}
