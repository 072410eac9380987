//! Traces: the digests of a state's leaves at a step and at the steps after it. They show whether a
//! resumed run is the same run. Each is a sidecar of the first step ([`crate::sidecars`]).
//!
//! A trace is JSON that the front end makes and reads, and ends in its own checksum. The digests
//! are those of [`stepwell_core::digest`].

use std::collections::BTreeMap;
use std::time::Duration;

use stepwell_core::digest::{DigestPart, digest_at};
use stepwell_core::format::manifest::Attempt;
use stepwell_core::format::{object, sealed_text};
use stepwell_core::io::Dir;
use stepwell_core::limits::MAX_TRACE_BYTES;
use stepwell_core::region::Region;
use stepwell_core::staging::StagingPool;
use stepwell_core::sys::{cores, each};

use crate::directory_layout::{TRACES, control};
use crate::environment::Environment;
use crate::error::Result;
use crate::sidecars::{self, attempt_of};
use crate::state::{Holders, LeafSource, StateSource};

/// Bytes that one thread digests at a time. A multiple of the size of every element.
const UNIT_BYTES: u64 = 4 << 20;
/// More threads gain nothing, because memory is the limit.
const MAX_THREADS: usize = 8;
/// The place of an object's length. No object is as long, and trailing zeros count.
const LENGTH_PLACE: u64 = 1 << 62;

/// The digests of this rank's part of a leaf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeafDigest {
    /// The rendered path.
    pub path: String,
    /// The dtype and shape of a tensor. `object` for a plain value.
    pub kind: String,
    /// True if its values may differ between ranks.
    pub drifts: bool,
    /// The regions that this rank holds, with their digests. An object has one without dimensions.
    pub parts: Vec<(Region, u64)>,
}

/// Returns the digests of all leaves, without ties. Fails if no staging slot gets free for `stall`.
pub(crate) fn digests(state: &StateSource, pool: &StagingPool, stall: Duration) -> Result<Vec<LeafDigest>> {
    let mut leaves = Vec::new();
    let mut units = Vec::new();
    for (number, source) in (0_u32..).zip(&state.leaves) {
        let (kind, drifts, parts) = match source {
            LeafSource::Tensor { dtype, shape, parts, provider } => {
                let mut of_rank = BTreeMap::new();
                for part in parts {
                    // A rank may hold a region twice.
                    of_rank.entry((part.region.offset.clone(), part.region.extent.clone())).or_insert(part);
                }
                for (place, part) in of_rank.values().enumerate() {
                    let itemsize = dtype.size() as u64;
                    let bytes = part.region.volume().unwrap_or(0).saturating_mul(itemsize);
                    for from in (0..bytes).step_by(UNIT_BYTES as usize) {
                        let len = UNIT_BYTES.min(bytes - from);
                        let (provider, region) = (&**provider, &part.region);
                        let part = DigestPart { provider, shape, region, itemsize, from, len };
                        units.push((leaves.len(), place, part));
                    }
                }
                let drifts = parts.iter().any(|part| part.holders == Holders::First);
                let kind = format!("{}{shape:?}", dtype.name());
                (kind, drifts, of_rank.values().map(|part| (part.region.clone(), 0)).collect())
            }
            LeafSource::Object(value) | LeafSource::Drifting(value) => {
                let bytes = object::encode(value)?;
                let length = digest_at(LENGTH_PLACE, &(bytes.len() as u64).to_le_bytes());
                let digest = digest_at(0, &bytes).wrapping_add(length);
                let drifts = matches!(source, LeafSource::Drifting(_));
                ("object".to_owned(), drifts, vec![(Region::whole(&[]), digest)])
            }
            LeafSource::Alias(_) => continue,
        };
        leaves.push(LeafDigest { path: state.tree.leaf_path(number).to_string(), kind, drifts, parts });
    }
    let sums =
        each("stepwell-digest", cores().min(MAX_THREADS), &units, |(.., part)| part.digest(pool, stall));
    for ((leaf, place, _), sum) in units.iter().zip(sums) {
        if let Some((_, digest)) = leaves.get_mut(*leaf).and_then(|leaf| leaf.parts.get_mut(*place)) {
            *digest = digest.wrapping_add(sum?);
        }
    }
    Ok(leaves)
}

/// Writes a trace of a committed step.
pub(crate) fn add(root: &dyn Dir, attempt: &Attempt, json: String, environment: &Environment) -> Result<()> {
    let mut bytes = json.into_bytes();
    sealed_text::seal(&mut bytes);
    if bytes.len() as u64 > MAX_TRACE_BYTES {
        let what = "the size of a trace in bytes".to_owned();
        return Err(
            stepwell_core::Error::Limit { what, found: bytes.len() as u64, limit: MAX_TRACE_BYTES }.into()
        );
    }
    crate::control::make_control(root)?;
    let name = control(TRACES);
    match root.create_dir(&name) {
        Ok(_) => root.open_dir(crate::directory_layout::CONTROL)?.sync()?,
        Err(error) if error.already_exists() => {}
        Err(error) => return Err(error.into()),
    }
    sidecars::write(&*root.open_dir(&name)?, attempt, &bytes, environment)
}

/// A trace of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTrace {
    /// The save of the step.
    pub attempt: Attempt,
    /// The name of its file.
    pub file: String,
    /// Its JSON, or why it is unreadable.
    pub json: std::result::Result<String, String>,
}

/// Reads the traces of a step, or all traces of a root, in the order of their names.
pub fn read(root: &dyn Dir, of: Option<&Attempt>) -> Result<Vec<StoredTrace>> {
    let dir = match root.open_dir(&control(TRACES)) {
        Ok(dir) => dir,
        Err(error) if error.is_not_found() => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let mut traces = Vec::new();
    for entry in dir.entries()? {
        let Some(attempt) = attempt_of(&entry.name).filter(|found| of.is_none_or(|of| of == found)) else {
            continue;
        };
        let json = match dir.read_file(&entry.name, MAX_TRACE_BYTES) {
            Ok(bytes) => sealed_text::unseal(&bytes)
                .and_then(|text| String::from_utf8(text.to_vec()).map_err(|_| "it is not UTF-8".to_owned())),
            // It was removed with its step, since the listing.
            Err(error) if error.is_gone() => continue,
            Err(error) => Err(error.to_string()),
        };
        traces.push(StoredTrace { attempt, file: entry.name, json });
    }
    Ok(traces)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use stepwell_core::dtype::Dtype;
    use stepwell_core::leaf_path::Component;
    use stepwell_core::provider::HostProvider;
    use stepwell_core::sys::HostSource;
    use stepwell_core::tree::{ContainerKind, Tree};
    use stepwell_core::value::Value;

    use super::*;
    use crate::state::Part;

    const SHAPE: [u64; 2] = [300, 20];

    /// A state of one tensor, held as bands of columns, and an object.
    fn state(bands: &[(u64, u64)], value: i64) -> StateSource {
        let mut tree = Tree::default();
        let root = tree.push_container(None, None, ContainerKind::Dict);
        for name in ["w", "n"] {
            tree.push_leaf(Some(root), Some(Component::Key(name.into())));
        }
        let memory = Arc::new((0..6000_u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>());
        let shards = bands.iter().map(|&(first, columns)| {
            let region = Region {
                offset: [0, first].into_iter().collect(),
                extent: [300, columns].into_iter().collect(),
            };
            let at = first as usize * 4;
            let source = HostSource::owned(Arc::clone(&memory), at, 4, &region.extent, &[80, 4]).unwrap();
            let provider: Arc<dyn stepwell_core::provider::StateProvider> =
                Arc::new(HostProvider::new(source));
            (Part { region, holders: Holders::Everyone }, provider)
        });
        let tensor =
            LeafSource::sharded(Dtype::from_name("float32").unwrap(), SHAPE.to_vec(), shards.collect());
        StateSource { tree, leaves: vec![tensor, LeafSource::Object(Value::Int(value))] }
    }

    fn digests_of(state: &StateSource) -> Vec<LeafDigest> {
        digests(state, &StagingPool::new(1, 4096).unwrap(), Duration::from_secs(10)).unwrap()
    }

    #[test]
    fn bands_of_a_tensor_add_up_to_its_digest() {
        let whole = digests_of(&state(&[(0, 20)], 7));
        let bands = digests_of(&state(&[(0, 3), (3, 10), (13, 7)], 7));
        assert_eq!((&*whole[0].path, &*whole[0].kind), ("w", "float32[300, 20]"));
        assert_eq!(bands[0].parts.len(), 3);
        let sum = bands[0].parts.iter().fold(0_u64, |sum, (_, digest)| sum.wrapping_add(*digest));
        assert_eq!(sum, whole[0].parts[0].1);
        assert_eq!(bands[1], whole[1]);
        assert_ne!(digests_of(&state(&[(0, 20)], 8))[1], whole[1]);
    }
}
