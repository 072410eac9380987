//! See [`stepwell_fuzz::index`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| stepwell_fuzz::index::run(input));
