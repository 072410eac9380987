//! See [`stepwell_fuzz::object`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| stepwell_fuzz::object::run(input));
