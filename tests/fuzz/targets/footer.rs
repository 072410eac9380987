//! See [`stepwell_fuzz::footer`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| stepwell_fuzz::footer::run(input));
