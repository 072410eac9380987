//! The bytes on disk, as `docs/format.md` describes them. No I/O here: bytes in, bytes out.

pub mod index;
