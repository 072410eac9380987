//! Copying a run of bytes past the cache, where it is long enough for that to pay.

use std::ptr;

/// Below this many bytes a streaming copy does not pay: its last stores must leave the core before the call returns.
const STREAM_FROM: usize = 4096;

/// Copies `len` bytes; large runs go past the cache.
///
/// # Safety
/// `src .. src + len` is readable, `dst .. dst + len` writable, and they do not overlap.
#[inline]
pub(super) unsafe fn run(dst: *mut u8, src: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= STREAM_FROM && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: as promised by the caller; the processor has AVX2.
        unsafe { x86::stream(dst, src, len) };
        return;
    }
    // SAFETY: as promised by the caller.
    unsafe { ptr::copy_nonoverlapping(src, dst, len) };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    use std::ptr;

    const VECTOR: usize = 32;
    const TURN: usize = 4 * VECTOR;

    /// # Safety
    /// As [`super::run`], and the processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn stream(dst: *mut u8, src: *const u8, len: usize) {
        let head = dst.align_offset(64).min(len);
        let turns = (len - head) / TURN;
        // SAFETY: all addresses below are at most `head + turns * TURN <= len` bytes from the start; stores are aligned to 64 after `head`.
        unsafe {
            ptr::copy_nonoverlapping(src, dst, head);
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
        // Streamed stores are ordered before whatever tells another thread of them.
        _mm_sfence();
    }
}
