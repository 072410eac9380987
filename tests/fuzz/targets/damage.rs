//! See [`stepwell_fuzz::damage`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| stepwell_fuzz::damage::run(input));
