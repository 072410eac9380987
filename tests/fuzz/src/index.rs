//! Index files: root table, outline and pages.

use std::path::Path;

use stepwell_core::format::index_v1::{self, INDEX_HEADER_BYTES, IndexHeader, Outline, Root};

use crate::{seal, sealed};

/// See the module documentation.
pub fn run(input: &[u8]) {
    let Some((is_sealed, bytes)) = sealed(input) else { return };
    let mut bytes = bytes.to_vec();
    if is_sealed {
        seal::index(&mut bytes, &[]);
    }
    let file = Path::new("index");
    let root = IndexHeader::decode(&bytes, file).and_then(|header| Root::decode(&header, &bytes, file));
    if let Ok(root) = &root {
        // Readers that want few leaves read pages alone, also of an index that is refused as a
        // whole.
        for page in &root.pages {
            if let Some(content) = page.slice(&bytes, 0) {
                let _ = index_v1::decode_part(root, page, content, file);
            }
        }
    }
    let crc = crate::seal::crc32c(&bytes);
    let outline =
        IndexHeader::decode(&bytes, file).and_then(|header| Outline::decode(&header, &bytes, crc, file));
    let outlined: Vec<_> = outline
        .iter()
        .flat_map(|outline| outline.pages().iter().map(move |page| (outline, page)))
        .map(|(outline, page)| outline.leaves(page, page.slice(&bytes, 0).unwrap_or_default(), file))
        .collect();
    let Ok(index) = index_v1::decode(&bytes, file) else { return };
    if let Ok(outline) = &outline {
        assert_eq!((&outline.index().tree, &outline.index().files), (&index.tree, &index.files));
        let pages = outlined.into_iter().collect::<Result<Vec<_>, _>>();
        let leaves = pages.expect("an index that is sound as a whole is so page by page").concat();
        assert_eq!(leaves, index.leaves, "by the outline or all together");
    }
    let root = root.expect("an index that was read has a root");
    assert!(bytes.len() as u64 >= INDEX_HEADER_BYTES);
    let mut leaves = Vec::new();
    for page in &root.pages {
        let content = page.slice(&bytes, 0).expect("its pages are there");
        let part =
            index_v1::decode_part(&root, page, content, file).expect("a page of a sound index is sound");
        assert_eq!(part.first_leaf, leaves.len() as u64);
        leaves.extend(part.leaves);
    }
    assert_eq!(leaves, index.leaves, "page by page or all together");
    let written = index_v1::encode(&index).expect("what was read can be written");
    let again = index_v1::decode(&written.bytes, file).expect("what was written can be read");
    assert_eq!(again, index);
    assert_eq!(index_v1::encode(&again).expect("again").bytes, written.bytes, "one encoding for one index");
}
