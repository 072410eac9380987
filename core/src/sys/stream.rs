//! Copies that bypass the CPU cache if they are long enough to gain from it.
//!
//! Streaming (non-temporal) stores do not read the destination first, and keep the training's data
//! in the caches. A [`fence`] orders them before later stores, so that other threads see the bytes.
//! The fence waits until the last store has left the core, which takes as long as copying a few
//! KiB.

use std::ptr;

/// Minimum bytes of a streaming copy with its own fence.
const STREAM_FROM: usize = 4096;
/// Minimum bytes of a streaming copy that shares a fence. In shorter rows too many cache lines are
/// only partly filled.
#[cfg(target_arch = "x86_64")]
const ROW_FROM: usize = 256;

/// Copies `len` bytes. Large runs bypass the cache.
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

/// Like [`run`], for one of several rows; the caller calls [`fence`] after the last. Separate rows
/// in the destination are mostly first touches of a page and of their cache lines, which a cached
/// copy would wait for.
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

/// Orders streaming stores before later stores.
#[inline]
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    x86::fence();
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    use std::ptr;

    /// Bytes of one vector, and the alignment of its streaming store.
    const VECTOR: usize = 32;
    /// Bytes per iteration: two cache lines.
    const TURN: usize = 4 * VECTOR;

    /// # Safety
    /// As [`super::run`], and the processor has AVX2.
    #[expect(clippy::cast_ptr_alignment, reason = "`loadu` takes any address; `stream` gets an aligned one")]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn stream(dst: *mut u8, src: *const u8, len: usize) {
        // Whole cache lines leave the core in one piece; a partly streamed line costs a read.
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
