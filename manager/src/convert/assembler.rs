//! Fills windows of output files with bytes of the source.

use stepwell_core::dtype::Dtype;
use stepwell_core::load::LoadOptions;
use stepwell_core::provider::cast;
use stepwell_core::region::volume;
use stepwell_core::sys::{Buffer, HostTarget};
use stepwell_reshard::layout::Place;
use stepwell_reshard::read_plan::Request;
use stepwell_reshard::subchunk::run_to_boxes;

use super::file_plan::{PieceContent, PlannedFile, tensor_of};
use super::windows::{OutputWindow, parts};
use crate::error::{Error, Result};
use crate::reader::Reader;

/// See the module documentation.
pub(super) struct Assembler<'a> {
    source: &'a Reader,
    options: LoadOptions,
    /// Holds elements before their cast.
    scratch: Buffer,
}

/// A run of elements that are cast on their way into a window.
struct CastRun {
    leaf: u32,
    from: Dtype,
    to: Dtype,
    /// First element and number of elements.
    start: u64,
    count: u64,
    /// The window, and the place in it.
    window: usize,
    at: usize,
}

impl<'a> Assembler<'a> {
    pub(super) fn new(source: &'a Reader, scratch: Buffer) -> Self {
        Self { source, options: source.load_options().clone(), scratch }
    }

    /// Fills a buffer for each window, and zeros the rest of the buffer. Checksums of pieces stay
    /// zero. `go_on` may stop it.
    pub(super) fn assemble(
        &mut self,
        files: &[PlannedFile],
        windows: &[OutputWindow],
        buffers: &mut [Buffer],
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let mut requests = Vec::new();
        let mut casts = Vec::new();
        for (number, (window, buffer)) in windows.iter().zip(&mut *buffers).enumerate() {
            let file = files.get(window.file).ok_or_else(|| Error::internal("a planned file", "none"))?;
            let mut end = 0;
            for part in parts(file, window) {
                zero(buffer, end, part.at);
                end = part.at + part.len;
                let Some(piece) = file.pieces.get(part.piece) else { continue };
                match &piece.content {
                    PieceContent::Bytes(bytes) => {
                        let from = part.from as usize;
                        if let (Some(to), Some(from)) =
                            (buffer.get_mut(part.at..end), bytes.get(from..from + part.len))
                        {
                            to.copy_from_slice(from);
                        }
                    }
                    PieceContent::Crc32 { .. } => zero(buffer, part.at, end),
                    PieceContent::Tensor { leaf, dtype } => {
                        let size = dtype.size() as u64;
                        let (start, count) = (part.from / size, part.len as u64 / size);
                        let stored = tensor_of(self.source, *leaf)?.dtype;
                        if stored == *dtype {
                            request(
                                self.source,
                                &mut requests,
                                *leaf,
                                (start, count),
                                number as u32,
                                part.at,
                            )?;
                        } else {
                            let (leaf, from, to) = (*leaf, stored, *dtype);
                            casts.push(CastRun { leaf, from, to, start, count, window: number, at: part.at });
                        }
                    }
                }
            }
            zero(buffer, end, buffer.len());
        }
        if !requests.is_empty() {
            let targets = buffers.iter_mut().map(|buffer| HostTarget::from(&mut **buffer));
            read(self.source, &self.options, &requests, targets, go_on)?;
        }
        self.cast(casts, buffers, go_on)
    }

    /// Reads as many elements at a time as the scratch memory holds, and casts them.
    fn cast(
        &mut self,
        casts: Vec<CastRun>,
        buffers: &mut [Buffer],
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let mut pending = casts.into_iter();
        let mut rest = pending.next();
        while rest.is_some() {
            let (mut requests, mut batch, mut used) = (Vec::new(), Vec::new(), 0);
            while let Some(run) = rest.take() {
                let size = run.from.size();
                used = usize::next_multiple_of(used, size);
                let count = run.count.min((self.scratch.len().saturating_sub(used) / size) as u64);
                if count == 0 {
                    rest = Some(run);
                    break;
                }
                request(self.source, &mut requests, run.leaf, (run.start, count), 0, used)?;
                let at = used;
                used += count as usize * size;
                let left = run.count - count;
                rest = if left == 0 {
                    pending.next()
                } else {
                    let at = run.at + count as usize * run.to.size();
                    Some(CastRun { start: run.start + count, count: left, at, ..run })
                };
                batch.push((at, CastRun { count, ..run }));
            }
            let scratch = [HostTarget::from(&mut *self.scratch)];
            read(self.source, &self.options, &requests, scratch, go_on)?;
            for (at, run) in batch {
                self.cast_run(at, &run, buffers)?;
            }
        }
        Ok(())
    }

    fn cast_run(&self, at: usize, run: &CastRun, buffers: &mut [Buffer]) -> Result<()> {
        let count = run.count as usize;
        let source = self.scratch.get(at..at + count * run.from.size());
        let end = run.at + count * run.to.size();
        let out = buffers.get_mut(run.window).and_then(|buffer| buffer.get_mut(run.at..end));
        let (Some(source), Some(out)) = (source, out) else {
            return Err(Error::internal("a cast inside its buffers", format!("one at {at}, to {end}")));
        };
        if cast(run.from, run.to, source, out) {
            return Ok(());
        }
        let leaf = self.source.tree().leaf_path(run.leaf).to_string();
        let what =
            format!("a value of it is too large for {}; leave it out of the cast, or rescale it", run.to);
        Err(stepwell_core::Error::Leaf { leaf, what }.into())
    }
}

/// Adds the requests for a run of elements of a flattened tensor.
fn request(
    source: &Reader,
    requests: &mut Vec<Request>,
    leaf: u32,
    (start, count): (u64, u64),
    dst: u32,
    at: usize,
) -> Result<()> {
    let tensor = tensor_of(source, leaf)?;
    let size = tensor.dtype.size() as u64;
    let wrong = || Error::internal("a run inside its tensor", format!("{start} + {count} of leaf {leaf}"));
    let mut dst_offset = at as u64;
    for region in run_to_boxes(&tensor.shape, start, count).ok_or_else(wrong)? {
        let Place { strides: dst_strides, .. } = Place::row_major(&region.extent, size);
        let bytes = volume(&region.extent).ok_or_else(wrong)? * size;
        requests.push(Request { leaf, region, dst, dst_offset, dst_strides });
        dst_offset += bytes;
    }
    Ok(())
}

fn read<'b>(
    source: &Reader,
    options: &LoadOptions,
    requests: &[Request],
    targets: impl IntoIterator<Item = HostTarget<'b>>,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<()> {
    let read = source.read_while(requests, targets, options, &mut |_| go_on());
    read.map(drop).map_err(|failure| failure.error)
}

fn zero(buffer: &mut Buffer, from: usize, to: usize) {
    if let Some(gap) = buffer.get_mut(from..to) {
        gap.fill(0);
    }
}
