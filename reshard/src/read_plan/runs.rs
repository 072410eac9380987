//! Box copies → runs: the blocks that they touch, coalesced.

use stepwell_core::format::index::Index;
use stepwell_core::read_plan::{BoxCopy, ReadRun};

use super::PlanOptions;

/// Blocks `start .. end` of a file, in bytes, that a copy needs.
struct Need {
    file: u32,
    start: u64,
    end: u64,
    copy: u32,
}

pub(super) fn runs(index: &Index, copies: &[BoxCopy], options: &PlanOptions) -> Vec<ReadRun> {
    let mut needs = Vec::with_capacity(copies.len());
    for (number, copy) in copies.iter().enumerate() {
        let block = options.block_of(copy.file);
        let length = index.files.get(copy.file as usize).map_or(u64::MAX, |file| file.length);
        let mut add = |start: u64, end: u64| {
            let need = Need {
                file: copy.file,
                start: start / block * block,
                end: end.div_ceil(block).saturating_mul(block).min(length),
                copy: number as u32,
            };
            match needs.last_mut() {
                Some(last @ Need { .. }) if last.copy == need.copy && last.end >= need.start => {
                    last.end = need.end;
                }
                _ => needs.push(need),
            }
        };
        // Rows that are no block apart, and no more than the gap, are read as one.
        let apart = options.max_gap_bytes.saturating_add(1).max(block);
        spans(copy, apart, &mut add);
    }
    needs.sort_by_key(|need| (need.file, need.start, need.end));
    coalesce(&needs, options)
}

/// The bytes from the first to the last element of the dimensions from `d` on.
fn width(copy: &BoxCopy, d: usize) -> u64 {
    let steps = copy.extent.iter().zip(&copy.src_strides).skip(d);
    steps.fold(u64::from(copy.itemsize), |width, (extent, stride)| width + (extent - 1) * stride)
}

/// Calls `add` for the byte spans that a copy reads, in order. Steps that leave less than `apart`
/// bytes between them make one span.
fn spans(copy: &BoxCopy, apart: u64, add: &mut impl FnMut(u64, u64)) {
    // The outermost dimensions, as many as step over more than `apart`, are walked; what lies
    // inside is one span.
    let ndim = copy.extent.len();
    let walked =
        (0..ndim).rev().find(|&d| copy.src_strides[d] - width(copy, d + 1).min(copy.src_strides[d]) >= apart);
    let walked = walked.map_or(0, |d| d + 1);
    let span = width(copy, walked);
    let mut at = vec![0_u64; walked];
    loop {
        let start =
            at.iter().zip(&copy.src_strides).fold(copy.src_offset, |start, (i, stride)| start + i * stride);
        add(start, start + span);
        let Some(d) = (0..walked).rev().find(|&d| at[d] + 1 < copy.extent[d]) else { return };
        at[d] += 1;
        at[d + 1..].fill(0);
    }
}

/// Sorted needs as runs.
fn coalesce(needs: &[Need], options: &PlanOptions) -> Vec<ReadRun> {
    let mut runs: Vec<ReadRun> = Vec::new();
    // Up to this offset, all needed bytes of the current file are inside a run.
    let mut done = 0;
    for need in needs {
        let block = options.block_of(need.file);
        let longest = (options.max_run_bytes / block).max(1) * block;
        if runs.last().is_none_or(|run| run.file != need.file) {
            done = 0;
        }
        let mut start = need.start.max(done);
        while start < need.end {
            // An adjacent block extends the run up to its limit. A block after a gap is included if
            // it fits.
            let extends = |run: &ReadRun| {
                run.file == need.file
                    && start - done <= options.max_gap_bytes
                    && if start == done {
                        start - run.offset < longest
                    } else {
                        need.end - run.offset <= longest
                    }
            };
            if !runs.last().is_some_and(extends) {
                runs.push(ReadRun { file: need.file, offset: start, len: 0, copies: Vec::new() });
            }
            let Some(run) = runs.last_mut() else { break };
            start = need.end.min(run.offset.saturating_add(longest));
            run.len = start - run.offset;
            done = start;
        }
    }
    // Needs and runs are both in file order; a need's runs are neighbours.
    let mut first = 0;
    for need in needs {
        while runs[first].file < need.file
            || (runs[first].file == need.file && end(&runs[first]) <= need.start)
        {
            first += 1;
        }
        let overlapping = |run: &&mut ReadRun| run.file == need.file && run.offset < need.end;
        for run in runs[first..].iter_mut().take_while(overlapping) {
            run.copies.push(need.copy);
        }
    }
    for run in &mut runs {
        run.copies.sort_unstable();
        run.copies.dedup();
    }
    runs
}

fn end(run: &ReadRun) -> u64 {
    run.offset + run.len
}
