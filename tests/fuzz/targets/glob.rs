//! See [`stepwell_fuzz::glob`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| stepwell_fuzz::glob::run(input));
