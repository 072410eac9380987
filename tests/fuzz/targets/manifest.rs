//! See [`stepwell_fuzz::manifest`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| stepwell_fuzz::manifest::run(input));
