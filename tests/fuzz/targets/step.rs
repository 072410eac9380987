//! See [`stepwell_fuzz::step`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| stepwell_fuzz::step::run(input));
