//! How long a restore of 1 GiB (300 tensors) takes beside the disk and the memory themselves.
//!
//! ```text
//! cargo run --release -p stepwell-core --example load_speed -- DIRECTORY [ROUNDS] [ENGINE]
//! ```
//!
//! Must run as root (it empties the page cache). The contestants take turns within each round;
//! medians are printed. Memory that a hypervisor has to back first would decide everything, so
//! destinations are reused, and for the rows *fresh* as much memory is touched and freed just
//! before.

#![expect(unsafe_code, reason = "maps a file, as the formats do that are compared with")]
#![expect(clippy::cast_precision_loss, reason = "for people to read")]

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use stepwell_core::dtype::Dtype;
use stepwell_core::format::footer;
use stepwell_core::format::header::Header;
use stepwell_core::format::index::{
    ChunkRecord, ChunkRegion, Codec, Extent, FileRecord, Index, Integrity, LeafRecord, Source, TensorRecord,
};
use stepwell_core::format::{block::DEFAULT_BLOCK_BYTES, checksum::crc32c};
use stepwell_core::io::{Disk, Engine, Transfer, open_disk};
use stepwell_core::leaf_path::Component;
use stepwell_core::load::{FileSet, LoadOptions, execute, verify};
use stepwell_core::read_plan::BoxCopy;
use stepwell_core::region::Region;
use stepwell_core::sys::{Buffer, HostTarget, Mapping};
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_core::{Error, Result};

const TOTAL: usize = 1 << 30;
const TENSORS: usize = 300;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let dir = PathBuf::from(arguments.next().unwrap_or_else(|| "target".into())).join("load_speed");
    let rounds: usize = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(9);
    let engine = arguments.next().unwrap_or_default().parse::<Engine>()?;
    std::fs::create_dir_all(&dir).map_err(|e| Error::io("mkdir", &dir, e))?;
    let path = dir.join("00000.data");
    let index = write_file(&path).map_err(|e| Error::io("write", &path, e))?;
    let disk = open_disk(&dir, engine)?;
    println!("engine {} ({} rounds)", disk.choice().engine, rounds);

    let bench = Bench { disk, dir: dir.clone(), path, copies: copies(&index), index };
    let mut given: Vec<Vec<u8>> = sizes().map(|len| vec![1; len]).collect();
    let raw_buffers = Mapping::new(TOTAL + (8 << 20))?.into_buffers(4 << 20)?;
    let mut raw = Some(raw_buffers);

    let names = [
        "raw O_DIRECT read, cold",
        "restore into given memory, cold",
        "restore into fresh memory, cold",
        "verify, cold",
        "read(2) + memcpy, cold",
        "mmap + memcpy, warm, 1 thread",
        "read(2) + memcpy, warm, 1 thread",
        "restore into given memory, warm",
        "restore into fresh memory, warm",
    ];
    let mut times: Vec<Vec<Duration>> = vec![Vec::new(); names.len()];
    for _ in 0..rounds {
        for (number, times) in times.iter_mut().enumerate() {
            let time = match number {
                0 => {
                    drop_caches();
                    let (time, buffers) = bench.raw(raw.take().unwrap_or_default())?;
                    raw = Some(buffers);
                    time
                }
                1 => {
                    drop_caches();
                    bench.restore(&mut given)?
                }
                2 => {
                    drop_caches();
                    bench.fresh()?
                }
                3 => {
                    drop_caches();
                    bench.verify()?
                }
                4 => {
                    drop_caches();
                    bench.plain(&mut given)
                }
                5 => {
                    warm(&bench.path);
                    bench.mapped(&mut given)
                }
                6 => bench.plain(&mut given),
                7 => bench.restore(&mut given)?,
                _ => bench.fresh()?,
            };
            times.push(time);
        }
    }
    for (name, times) in names.iter().zip(&mut times) {
        times.sort();
        let seconds = |time: Option<&Duration>| time.map_or(0.0, Duration::as_secs_f64);
        let median = seconds(times.get(times.len() / 2));
        println!(
            "{name:34} {median:.3} s  {:5.2} GB/s   ({:.3}–{:.3})",
            (TOTAL >> 20) as f64 * 1.048_576e-3 / median,
            seconds(times.first()),
            seconds(times.last())
        );
    }
    std::fs::remove_dir_all(&dir).map_err(|e| Error::io("remove", &dir, e))
}

/// Sizes of tensors: most of a few MiB, some small, as in a small transformer.
fn sizes() -> impl Iterator<Item = usize> {
    let small = (0..TENSORS / 3).map(|i| 4096 + i * 64);
    let large = TENSORS - TENSORS / 3;
    let rest = TOTAL - (0..TENSORS / 3).map(|i| 4096 + i * 64).sum::<usize>();
    let share = rest / large / 64 * 64;
    small.chain((0..large).map(move |i| if i + 1 == large { rest - share * (large - 1) } else { share }))
}

fn write_file(path: &Path) -> std::io::Result<Index> {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let mut index = Index::default();
    let mut at = 4096_usize;
    for (i, len) in sizes().enumerate() {
        at = if len >= 4096 { at.next_multiple_of(4096) } else { at.next_multiple_of(64) };
        tree.push_leaf(Some(root), Some(Component::Key(format!("w{i}").into())));
        let shape = vec![len as u64];
        index.leaves.push(LeafRecord::Tensor(TensorRecord {
            dtype: Dtype::Uint8,
            view: None,
            rank_key: None,
            chunks: vec![ChunkRecord {
                region: ChunkRegion::Box(Region::whole(&shape)),
                extent: Extent {
                    source: Source::Own(0),
                    offset: at as u64,
                    length: len as u64,
                    integrity: Integrity::BlockCrc,
                },
                codec: Codec::Raw,
            }]
            .into(),
            shape: shape.into(),
        }));
        at += len;
    }
    index.tree = tree;
    let mut bytes = Header::new(1, DEFAULT_BLOCK_BYTES, 0).encode();
    bytes.resize(at.next_multiple_of(4096), 0);
    let mut state = 1_u64;
    for word in bytes.get_mut(4096..).unwrap_or_default().chunks_exact_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        word.copy_from_slice(&state.to_le_bytes());
    }
    let crcs: Vec<u32> = bytes.chunks(DEFAULT_BLOCK_BYTES as usize).map(crc32c).collect();
    let footer = footer::encode(1, DEFAULT_BLOCK_BYTES, bytes.len() as u64, &index, &crcs)
        .map_err(std::io::Error::other)?;
    let mut file = File::create(path)?;
    file.write_all(&bytes)?;
    file.write_all(&footer.bytes)?;
    file.sync_all()?;
    index.files.push(FileRecord {
        name: "00000.data".into(),
        length: (bytes.len() + footer.bytes.len()) as u64,
        file_id: 1,
        trailer_crc: footer.trailer_crc,
        within: None,
    });
    Ok(index)
}

fn extents(index: &Index) -> impl Iterator<Item = Extent> {
    index.leaves.iter().filter_map(|leaf| match leaf {
        LeafRecord::Tensor(tensor) => tensor.chunks.first().map(|chunk| chunk.extent),
        _ => None,
    })
}

fn copies(index: &Index) -> Vec<BoxCopy> {
    let mut copies = Vec::new();
    for (number, extent) in (0..).zip(extents(index)) {
        copies.push(BoxCopy {
            leaf: number,
            file: 0,
            src_offset: extent.offset,
            src_strides: vec![1].into(),
            extent: vec![extent.length].into(),
            itemsize: 1,
            dst: number,
            dst_offset: 0,
            dst_strides: vec![1].into(),
            inverted: 0,
        });
    }
    copies
}

struct Bench {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    path: PathBuf,
    copies: Vec<BoxCopy>,
    index: Index,
}

impl Bench {
    fn restore(&self, into: &mut [Vec<u8>]) -> Result<Duration> {
        let start = Instant::now();
        let targets: Vec<HostTarget<'_>> =
            into.iter_mut().map(|v| HostTarget::from(v.as_mut_slice())).collect();
        let files = FileSet::new(self.disk.open_dir(&self.dir)?, &self.index.files);
        execute(self.disk.as_ref(), &files, &self.index, &self.copies, targets, &LoadOptions::default())?;
        Ok(start.elapsed())
    }

    fn fresh(&self) -> Result<Duration> {
        back_memory();
        let start = Instant::now();
        // One mapping of huge pages that nobody has touched: what a front end allocates its results
        // from.
        let mut arena = Fresh::new(TOTAL + TENSORS * 4096);
        let mut rest = arena.bytes();
        let mut targets = Vec::new();
        for len in sizes() {
            let (target, right) = rest.split_at_mut(len);
            targets.push(HostTarget::from(target));
            rest = right;
        }
        let files = FileSet::new(self.disk.open_dir(&self.dir)?, &self.index.files);
        execute(self.disk.as_ref(), &files, &self.index, &self.copies, targets, &LoadOptions::default())?;
        Ok(start.elapsed())
    }

    fn verify(&self) -> Result<Duration> {
        let start = Instant::now();
        let files = FileSet::new(self.disk.open_dir(&self.dir)?, &self.index.files);
        let report = verify(self.disk.as_ref(), &files, &self.index, &LoadOptions::default(), &mut |_| true)?;
        assert!(report.damages.is_empty());
        Ok(start.elapsed())
    }

    fn raw(&self, mut buffers: Vec<Buffer>) -> Result<(Duration, Vec<Buffer>)> {
        let start = Instant::now();
        let file = self.disk.open_dir(&self.dir)?.open_file("00000.data")?;
        let len = file.len()?;
        let mut queue = self.disk.queue(8)?;
        let mut back = Vec::with_capacity(buffers.len());
        let mut offset = 0;
        while offset < len || queue.in_flight() > 0 {
            if offset < len && queue.in_flight() < 8 {
                let part = (len - offset).min(4 << 20) as usize;
                if let Some(buffer) = buffers.pop() {
                    queue.submit(Transfer::Read, &file, offset, part, buffer, 0);
                }
                offset += part as u64;
            } else if let Some(done) = queue.complete(Duration::from_secs(60)) {
                done.result?;
                back.push(done.buffer);
            }
        }
        let time = start.elapsed();
        back.append(&mut buffers);
        Ok((time, back))
    }

    fn plain(&self, into: &mut [Vec<u8>]) -> Duration {
        let start = Instant::now();
        let mut copied = || -> std::io::Result<()> {
            let mut file = File::open(&self.path)?;
            let mut buffer = vec![0_u8; 1 << 20];
            let (mut tensors, mut at) = (into.iter_mut(), 0);
            let mut current = tensors.next();
            loop {
                let count = file.read(&mut buffer)?;
                let mut bytes = buffer.get(..count).unwrap_or_default();
                while let Some(tensor) = current.as_deref_mut() {
                    let n = bytes.len().min(tensor.len() - at);
                    let (now, later) = bytes.split_at(n);
                    tensor.get_mut(at..at + n).unwrap_or_default().copy_from_slice(now);
                    (bytes, at) = (later, at + n);
                    if at < tensor.len() {
                        break;
                    }
                    (current, at) = (tensors.next(), 0);
                }
                if count == 0 {
                    return Ok(());
                }
            }
        };
        drop(std::hint::black_box(copied()));
        start.elapsed()
    }

    fn mapped(&self, into: &mut [Vec<u8>]) -> Duration {
        use std::os::fd::AsRawFd;
        let start = Instant::now();
        let Ok(file) = File::open(&self.path) else { return Duration::ZERO };
        let len = file.metadata().map_or(0, |meta| meta.len() as usize);
        // SAFETY: a private mapping of a file that nobody changes, at an address of the kernel's
        // choice.
        let address = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0)
        };
        assert_ne!(address, libc::MAP_FAILED);
        // SAFETY: just mapped, readable, and unmapped only below.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len) };
        for (tensor, extent) in into.iter_mut().zip(extents(&self.index)) {
            let at = extent.offset as usize;
            tensor.copy_from_slice(bytes.get(at..at + extent.length as usize).unwrap_or_default());
        }
        // SAFETY: what was mapped above; `bytes` is not used any more.
        unsafe { libc::munmap(address, len) };
        start.elapsed()
    }
}

/// Memory that nobody has touched, in huge pages.
struct Fresh(*mut u8, usize);

impl Fresh {
    fn new(len: usize) -> Self {
        let len = len.next_multiple_of(2 << 20) + (2 << 20);
        // SAFETY: a new anonymous mapping at an address of the kernel's choice; advice changes no
        // content.
        unsafe {
            let address = libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(address, libc::MAP_FAILED);
            libc::madvise(address, len, libc::MADV_HUGEPAGE);
            Self(address.cast(), len)
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped in `new`, zeroed by the kernel, reachable through this only.
        unsafe { std::slice::from_raw_parts_mut(self.0, self.1) }
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        // SAFETY: what `new` mapped.
        unsafe { libc::munmap(self.0.cast(), self.1) };
    }
}

/// Touches memory and frees it, so that the machine below has backed it when it is used next.
fn back_memory() {
    let mut spare = Fresh::new(TOTAL + (256 << 20));
    spare.bytes().iter_mut().step_by(4096).for_each(|byte| *byte = 1);
}

fn drop_caches() {
    let _ = std::fs::write("/proc/sys/vm/drop_caches", "3");
}

fn warm(path: &Path) {
    drop(std::hint::black_box(std::fs::read(path)));
}
