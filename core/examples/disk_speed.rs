//! Measures each engine on this disk: writing and cold reading of one file, in GB/s.
//!
//! `cargo run --release -p stepwell-core --example disk_speed -- DIRECTORY [MIB] [TRANSFER_KIB]
//! [DEPTH]`
#![expect(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a measuring tool")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stepwell_core::io::{Engine, File, Queue, Transfer, open_disk};
use stepwell_core::sys::{Buffer, Mapping};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let dir = PathBuf::from(arguments.next().unwrap_or_else(|| ".".into()));
    let mut number = |default: usize| arguments.next().map_or(default, |text| text.parse().unwrap());
    let (mib, transfer_kib, depth) = (number(1024), number(4096), number(8));
    let (total, size) = (mib << 20, transfer_kib << 10);
    let mut buffers = Mapping::new(depth * size).unwrap().into_buffers(size).unwrap();
    buffers.truncate(depth);
    for (i, byte) in buffers.iter_mut().flat_map(|buffer| buffer.iter_mut()).enumerate() {
        *byte = (i % 255) as u8;
    }
    println!("{mib} MiB in transfers of {transfer_kib} KiB, {depth} in flight; GB/s (CPU seconds)");
    for round in 0..4 {
        for (name, engine, register) in [
            ("io_uring registered", Engine::Uring, true),
            ("io_uring", Engine::Uring, false),
            ("threads", Engine::Threads, false),
            ("buffered", Engine::Buffered, false),
        ] {
            let disk = open_disk(&dir, engine).unwrap();
            if round == 0 {
                println!("{name}: {:?}", disk.choice());
            }
            let begun = Instant::now();
            if register {
                disk.register(&[Arc::clone(buffers[0].mapping())]).unwrap();
            }
            let mut queue = disk.queue(depth).unwrap();
            let setup = begun.elapsed();
            let root = disk.open_dir(&dir).unwrap();
            let scratch = format!(".disk_speed-{}", std::process::id());
            let file = root.create_file(&scratch, total as u64).unwrap();
            let (write, write_cpu) = timed(|| {
                pump(queue.as_mut(), Transfer::Write, &file, total, size, &mut buffers);
                file.sync().unwrap();
            });
            drop(file);
            drop_cache(&dir.join(&scratch));
            let file = root.open_file(&scratch).unwrap();
            let (read, read_cpu) = timed(|| {
                pump(queue.as_mut(), Transfer::Read, &file, total, size, &mut buffers);
            });
            let rate = |time: Duration| total as f64 / 1e9 / time.as_secs_f64();
            println!(
                "{name:20} write {:5.2} ({:.3})  read {:5.2} ({:.3})  set-up {:.2} ms",
                rate(write),
                write_cpu,
                rate(read),
                read_cpu,
                setup.as_secs_f64() * 1e3
            );
            drop((file, queue));
            root.remove_file(&scratch).unwrap();
            root.sync().unwrap();
            // Blocks that were just freed slow the next writer down on file systems mounted with
            // `discard`.
            std::thread::sleep(Duration::from_millis(1500));
        }
    }
}

fn pump(
    queue: &mut dyn Queue,
    transfer: Transfer,
    file: &Arc<dyn File>,
    total: usize,
    size: usize,
    buffers: &mut Vec<Buffer>,
) {
    let mut offsets = (0..total).step_by(size);
    let mut next = offsets.next();
    while next.is_some() || queue.in_flight() > 0 {
        while let (Some(offset), false) = (next, buffers.is_empty()) {
            queue.submit(transfer, file, offset as u64, size, buffers.pop().unwrap(), 0);
            next = offsets.next();
        }
        let done = queue.complete(Duration::from_secs(60)).unwrap();
        assert_eq!(done.result.unwrap(), size);
        buffers.push(done.buffer);
    }
}

/// Wall-clock time and CPU seconds of the process.
fn timed(act: impl FnOnce()) -> (Duration, f64) {
    // Fields 14 and 15 of the file, in hundredths of a second; what stands before the last
    // parenthesis is the program's name.
    let cpu = || {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let fields = stat.rsplit(')').next().unwrap().split_whitespace().skip(11).take(2);
        fields.map(|ticks| ticks.parse::<f64>().unwrap()).sum::<f64>() / 100.0
    };
    let (begun, used) = (Instant::now(), cpu());
    act();
    (begun.elapsed(), cpu() - used)
}

fn drop_cache(path: &std::path::Path) {
    let file = std::fs::File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}
