//! Manifests. Raw bytes never get past the last line, which is its checksum; sealed ones are judged
//! by their JSON.

use std::path::Path;

use stepwell_core::format::manifest::Manifest;

use crate::{seal, sealed};

/// See the module documentation.
pub fn run(input: &[u8]) {
    let Some((is_sealed, text)) = sealed(input) else { return };
    let sealed_text = if is_sealed { seal::manifest(text) } else { text.to_vec() };
    let file = Path::new("manifest.json");
    let Ok(manifest) = Manifest::decode(&sealed_text, file) else { return };
    // Thinning rewrites a step's manifest, so a decoded one must encode.
    let written = manifest.encode().expect("what was read can be written");
    let again = Manifest::decode(&written, file).expect("what was written can be read");
    assert_eq!(again.encode().ok().as_deref(), Some(written.as_slice()), "one text for one manifest");
    for item in &again.items {
        assert!(again.item(&item.name).is_some());
        for entry in again.files_of(item) {
            assert!(entry.path.starts_with(&item.dir));
        }
    }
}
