//! See [`stepwell_fuzz::state`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| stepwell_fuzz::state::run(input));
