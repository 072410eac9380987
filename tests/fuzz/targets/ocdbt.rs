//! See [`stepwell_fuzz::foreign`].
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| stepwell_fuzz::foreign::ocdbt(input));
