//! The fuzz targets: one module per target, each a function of bytes that panics on a broken
//! promise.
//!
//! | target | what is made of the bytes | what must hold |
//! |---|---|---|
//! | [`manifest`] | a manifest, raw or with its checksum put right | no panic; what decodes encodes to one text that decodes to it |
//! | [`index`] | an index file, likewise | the same; every page read alone says what all together say |
//! | [`footer`] | a data file, likewise | the same; block checksums, page table and pages agree |
//! | [`object`] | the encoding of an object, or an object | a value has one encoding |
//! | [`message`] | what ranks tell each other | no panic; what decodes encodes to one message |
//! | [`step`] | manifest, indexes and data files of a step, with every checksum put right | no panic, no hang; a step whose verification finds nothing restores |
//! | [`damage`] | edits of the files of a sound step, no checksum put right | every edit is found, and no value but the saved one is ever given out |
//! | [`state`] | a state | it is refused and leaves nothing, or restores as it was saved |
//! | [`glob`] | globs, renames and paths | no panic, no hang; an escaped path matches itself alone |
//! | [`foreign`] (`pickle`, `zip`, `safetensors`, `npy`, `msgpack`, `ocdbt`) | bytes of other libraries | no panic; what is found lies inside the bytes |
//!
//! Checksums guard everything, so a mutated file would fail at the first of them. [`seal`] corrects
//! them, as an attacker would.
//!
//! Memory is bounded by libFuzzer (`-malloc_limit_mb`, `-rss_limit_mb`): inputs are small, so that
//! an allocation that a number in a file asks for shows.

pub mod damage;
pub mod footer;
pub mod foreign;
pub mod glob;
pub mod index;
pub mod manifest;
pub mod message;
pub mod object;
pub mod seal;
pub mod seeds;
pub mod state;
pub mod step;
mod tree;
mod world;

/// Splits off the byte that says whether checksums are put right (odd) or the rest is taken as it
/// is.
fn sealed(input: &[u8]) -> Option<(bool, &[u8])> {
    let (&first, rest) = input.split_first()?;
    Some((first & 1 == 1, rest))
}
