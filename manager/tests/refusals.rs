//! Saves that the commit would refuse are refused before a byte is captured or written.

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::*;
use stepwell_core::dtype::Dtype;
use stepwell_core::limits;
use stepwell_core::provider::{Fill, StateProvider};
use stepwell_core::staging::{Filling, Slot};
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_manager::{Error, LeafSource, SaveRequest, StateSource, singular};

/// Counts how often it is read.
#[derive(Default)]
struct Counted(AtomicU64);

impl StateProvider for Counted {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> stepwell_core::Result<()> {
        self.0.fetch_add(1, Ordering::SeqCst);
        for fill in fills {
            slot.part(fill.at, fill.len)?.fill(7);
        }
        Ok(())
    }
}

/// `{name: {"w": …}}`.
fn state_named(name: &str, provider: &Arc<Counted>) -> StateSource {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let item = tree.push_container(Some(root), key(name), ContainerKind::Dict);
    tree.push_leaf(Some(item), key("w"));
    let provider = Arc::clone(provider) as _;
    let leaf = LeafSource::whole(Dtype::Uint8, vec![100], provider);
    StateSource { tree, leaves: vec![leaf] }
}

fn nested(levels: u64) -> serde_json::Value {
    (0..levels).fold(serde_json::Value::Null, |value, level| {
        if level % 2 == 0 { serde_json::json!([value]) } else { serde_json::json!({ "a": value }) }
    })
}

/// The parts of a save beside its tensors.
#[derive(Clone)]
struct Extras {
    name: String,
    metrics: BTreeMap<String, f64>,
    metadata: serde_json::Value,
}

impl Default for Extras {
    fn default() -> Self {
        Self { name: "params".into(), metrics: BTreeMap::new(), metadata: serde_json::Value::Null }
    }
}

/// Everything that is a step too far, with what the error must name and its limit.
fn too_much() -> Vec<(Extras, &'static str, u64)> {
    let long = |bytes: u64| "n".repeat(bytes as usize);
    let extras = Extras::default;
    vec![
        (
            Extras { metadata: nested(limits::MAX_METADATA_DEPTH + 1), ..extras() },
            "nesting of the metadata",
            limits::MAX_METADATA_DEPTH,
        ),
        (
            Extras { metadata: long(limits::MAX_METADATA_BYTES).into(), ..extras() },
            "size of the metadata",
            limits::MAX_METADATA_BYTES,
        ),
        (
            Extras { metrics: BTreeMap::from([(long(limits::MAX_NAME_BYTES + 1), 1.0)]), ..extras() },
            "metric's name",
            limits::MAX_NAME_BYTES,
        ),
        (
            Extras {
                metrics: (0..=limits::MAX_METRICS).map(|i| (format!("m{i}"), 0.5)).collect(),
                ..extras()
            },
            "number of metrics",
            limits::MAX_METRICS,
        ),
        (
            // Each name is allowed, and all of them together are too many bytes.
            Extras {
                metrics: (0..1200)
                    .map(|i| (format!("{i}{}", long(limits::MAX_NAME_BYTES - 8)), 0.5))
                    .collect(),
                ..extras()
            },
            "manifest's size",
            limits::MAX_MANIFEST_BYTES,
        ),
        (
            Extras { name: long(2 * limits::MAX_NAME_BYTES + 9), ..extras() },
            "an item's name",
            2 * limits::MAX_NAME_BYTES + 8,
        ),
        (Extras { name: long(limits::MAX_NAME_BYTES + 1), ..extras() }, "a name", limits::MAX_NAME_BYTES),
    ]
}

fn assert_names(error: &Error, what: &str, limit: u64) {
    let found = match error.core() {
        Some(stepwell_core::Error::Limit { what: said, limit, .. }) => Some((said.contains(what), *limit)),
        _ => None,
    };
    assert_eq!(found, Some((true, limit)), "{what}: {error}");
}

#[test]
fn a_save_refuses_early_what_its_commit_would_refuse() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 0);
    for (extras, what, limit) in too_much() {
        let provider = Arc::new(Counted::default());
        let request = SaveRequest {
            metrics: extras.metrics,
            custom_metadata: extras.metadata,
            ..SaveRequest::new(1, state_named(&extras.name, &provider))
        };
        assert_names(&manager.save(request).expect_err(what), what, limit);
        assert_eq!(provider.0.load(Ordering::SeqCst), 0, "{what}: captured");
        assert_eq!(world.names(), ["step_00000000"], "{what}");
        assert!(manager.pending().unwrap().is_empty());
        assert_eq!(manager.next_step().unwrap(), 1);
    }
    // Nothing is left to be told, and the number is free.
    manager.wait_until_finished(Some(LONG)).unwrap();
    commit(&manager, 1);
}

#[test]
fn a_singular_save_refuses_the_same() {
    let world = World::default();
    for (extras, what, limit) in too_much() {
        let provider = Arc::new(Counted::default());
        let request = SaveRequest {
            metrics: extras.metrics,
            custom_metadata: extras.metadata,
            ..SaveRequest::new(0, state_named(&extras.name, &provider))
        };
        let error = singular::save(Path::new("/models/a"), request, &options(), &world.environment())
            .expect_err(what);
        assert_names(&error, what, limit);
        assert_eq!(provider.0.load(Ordering::SeqCst), 0, "{what}: captured");
        assert!(world.disk.image().get("/models").unwrap().entries().unwrap().is_empty());
    }
}

#[test]
fn unreadable_later_metrics_are_refused_unwritten() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    let before = world.disk.image();
    let name = |bytes: u64| "n".repeat(bytes as usize);
    let many = |n: u64| (0..n).map(|i| (format!("{i}"), 0.5)).collect::<BTreeMap<_, _>>();
    let long = |n: usize| {
        let name = name(limits::MAX_NAME_BYTES - 8);
        (0..n).map(|i| (format!("{i}{name}"), 0.5)).collect::<BTreeMap<_, _>>()
    };
    for (metrics, what, limit) in [
        (many(limits::MAX_METRICS + 1), "number of metrics", limits::MAX_METRICS),
        (BTreeMap::from([(name(limits::MAX_NAME_BYTES + 1), 0.5)]), "metric's name", limits::MAX_NAME_BYTES),
        (long(65), "size of the metrics", limits::MAX_METADATA_BYTES),
    ] {
        assert_names(&manager.add_metrics(1, &metrics).expect_err(what), what, limit);
        assert_eq!(world.disk.image(), before, "{what}");
    }
    for metrics in [many(limits::MAX_METRICS), long(60)] {
        manager.add_metrics(1, &metrics).unwrap();
        let found = manager.metrics(1).unwrap();
        assert!(metrics.iter().all(|(name, value)| found.get(name) == Some(value)));
    }
}

#[test]
fn what_is_just_within_its_limits_is_committed_and_read_back() {
    let world = World::default();
    let manager = world.open(options());
    let metadata = nested(limits::MAX_METADATA_DEPTH);
    let metrics: BTreeMap<String, f64> = [
        ("n".repeat(limits::MAX_NAME_BYTES as usize), -0.0),
        ("tiny".into(), f64::MIN_POSITIVE / 2.0),
        ("huge".into(), f64::MAX),
        ("inf".into(), f64::NEG_INFINITY),
        ("third".into(), 1.0 / 3.0),
    ]
    .into();
    let request = SaveRequest { metrics: metrics.clone(), custom_metadata: metadata.clone(), ..request(3) };
    committed(&manager.save(request).unwrap());
    let manifest = manager.manifest(Some(3)).unwrap();
    assert_eq!(manifest.custom_metadata, metadata);
    let bits = |metrics: &BTreeMap<String, f64>| {
        metrics.iter().map(|(name, value)| (name.clone(), value.to_bits())).collect::<Vec<_>>()
    };
    assert_eq!(bits(&manifest.metrics), bits(&metrics));
}
