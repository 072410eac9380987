//! Copying a run of bytes past the cache, where it is long enough for that to pay.
//!
//! Streaming (non-temporal) stores do not read the destination first, and leave in the caches what
//! training holds there. They are ordered before what follows by a [`fence`], so that another
//! thread may be told of the bytes; it waits until the last of them has left the core, which is as
//! long as a few KiB take.

use std::ptr;

/// Below this many bytes a streaming copy with a fence of its own does not pay.
const STREAM_FROM: usize = 4096;
/// And below this many one of several with a fence for all: of a short row too much is lines that
/// are not filled.
const ROW_FROM: usize = 256;

/// Copies `len` bytes; large runs go past the cache.
///
/// # Safety
/// `src .. src + len` is readable, `dst .. dst + len` writable, and they do not overlap.
#[inline]
pub(super) unsafe fn run(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe {
        if len < STREAM_FROM {
            ptr::copy_nonoverlapping(src, dst, len);
        } else {
            row(dst, src, len);
            fence();
        }
    }
}

/// [`run`] for one row of several, after the last of which the caller calls [`fence`]: rows that
/// lie apart in the destination are mostly the first touch of a page and of each of their lines,
/// which a copy through the cache waits for.
///
/// # Safety
/// As [`run`].
#[inline]
pub(super) unsafe fn row(dst: *mut u8, src: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= ROW_FROM && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: as promised by the caller; the processor has AVX2.
        unsafe { x86::stream(dst, src, len) };
        return;
    }
    // SAFETY: as promised by the caller.
    unsafe { ptr::copy_nonoverlapping(src, dst, len) };
}

/// Orders what was streamed before what follows.
#[inline]
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    x86::fence();
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    use std::ptr;

    /// Bytes of one vector, and alignment that its streaming store demands.
    const VECTOR: usize = 32;
    /// Bytes per turn of the loop: two cache lines.
    const TURN: usize = 4 * VECTOR;

    /// # Safety
    /// As [`super::run`], and the processor has AVX2.
    #[expect(clippy::cast_ptr_alignment, reason = "`loadu` takes any address; `stream` gets an aligned one")]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn stream(dst: *mut u8, src: *const u8, len: usize) {
        // Whole cache lines leave the core in one piece; a line of which only a part was streamed
        // costs a read.
        let head = dst.align_offset(64).min(len);
        // SAFETY: `head <= len`.
        unsafe { ptr::copy_nonoverlapping(src, dst, head) };
        let turns = (len - head) / TURN;
        // SAFETY: all addresses below are less than `head + turns * TURN <= len` bytes from the
        // start; stores are aligned to 64 after `head`.
        unsafe {
            let mut from = src.add(head);
            let mut to = dst.add(head);
            for _ in 0..turns {
                let a = _mm256_loadu_si256(from.cast::<__m256i>());
                let b = _mm256_loadu_si256(from.add(VECTOR).cast::<__m256i>());
                let c = _mm256_loadu_si256(from.add(2 * VECTOR).cast::<__m256i>());
                let d = _mm256_loadu_si256(from.add(3 * VECTOR).cast::<__m256i>());
                _mm256_stream_si256(to.cast::<__m256i>(), a);
                _mm256_stream_si256(to.add(VECTOR).cast::<__m256i>(), b);
                _mm256_stream_si256(to.add(2 * VECTOR).cast::<__m256i>(), c);
                _mm256_stream_si256(to.add(3 * VECTOR).cast::<__m256i>(), d);
                from = from.add(TURN);
                to = to.add(TURN);
            }
            ptr::copy_nonoverlapping(from, to, len - head - turns * TURN);
        }
    }

    pub(super) fn fence() {
        // SAFETY: every x86-64 has SSE.
        unsafe { _mm_sfence() };
    }
}
