//! See [`stepwell_fuzz::message`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| stepwell_fuzz::message::run(input));
