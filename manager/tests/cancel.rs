//! Cancelling a save: the state is read no more once the call has returned, and nothing of it is
//! committed.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use stepwell_core::dtype::Dtype;
use stepwell_core::leaf_path::Component;
use stepwell_core::provider::{Fill, StateProvider};
use stepwell_core::staging::{Filling, Slot};
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_manager::{Error, LeafSource, Options, Outcome, SaveRequest, StateSource, singular};

/// Bytes that arrive slowly: a call takes some milliseconds, and all calls are counted.
#[derive(Default)]
struct Slow {
    calls: AtomicU64,
}

impl StateProvider for Slow {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> stepwell_core::Result<()> {
        for fill in fills {
            slot.part(fill.at, fill.len)?.fill(7);
        }
        std::thread::sleep(Duration::from_millis(5));
        self.calls.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// A state of 2000 leaves that share the provider.
fn slow(provider: &Arc<Slow>) -> StateSource {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let list = tree.push_container(Some(root), key("params"), ContainerKind::List);
    let mut leaves = Vec::new();
    for leaf in 0..2000 {
        tree.push_leaf(Some(list), Some(Component::Index(leaf)));
        leaves.push(LeafSource::whole(Dtype::Uint8, vec![4096], Arc::clone(provider) as _));
    }
    StateSource { tree, leaves }
}

fn assert_cancelled(error: Option<&Error>) {
    assert_eq!(error.map(Error::kind), Some("save_failed"), "{error:?}");
    assert!(matches!(error.and_then(Error::core), Some(stepwell_core::Error::Cancelled(_))), "{error:?}");
}

/// Cancels as soon as the provider is read from, and runs `save`, which must fail; afterwards the
/// provider is read no more.
fn cancelled_in_the_middle(
    provider: &Arc<Slow>,
    cancel: impl Fn() + Sync,
    save: impl FnOnce() -> stepwell_manager::Result<stepwell_manager::Save>,
) {
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            while provider.calls.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            cancel();
        });
        save().err()
    });
    assert_cancelled(error.as_ref());
    let calls = provider.calls.load(Ordering::SeqCst);
    assert!(calls < 1000, "it ended by itself");
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(
        provider.calls.load(Ordering::SeqCst),
        calls,
        "the state was read after the call had returned"
    );
}

#[test]
fn a_cancelled_save_reads_the_state_no_more_and_commits_nothing() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 0);
    let provider = Arc::new(Slow::default());
    let cancel = Arc::new(AtomicBool::new(false));
    let request = SaveRequest { cancel: Arc::clone(&cancel), ..SaveRequest::new(1, slow(&provider)) };
    cancelled_in_the_middle(&provider, || cancel.store(true, Ordering::SeqCst), || manager.save(request));
    // The caller was told; nothing is raised again.
    manager.wait_until_finished(Some(LONG)).unwrap();
    assert_eq!(manager.all_steps().unwrap(), [0]);
    commit(&manager, 1);
    assert_restores(&manager, 1);
    manager.close(Some(LONG)).unwrap();
    assert_eq!(world.names(), ["step_00000000", "step_00000001"]);
}

#[test]
fn a_cancelled_singular_save_leaves_nothing() {
    let world = World::default();
    let provider = Arc::new(Slow::default());
    let request = SaveRequest::new(0, slow(&provider));
    let cancel = Arc::clone(&request.cancel);
    cancelled_in_the_middle(
        &provider,
        || cancel.store(true, Ordering::SeqCst),
        || singular::save(Path::new("/models/a"), request, &options(), &world.environment()),
    );
    assert!(world.disk.image().get("/models").unwrap().entries().unwrap().is_empty());
}

#[test]
fn a_save_that_waits_behind_others_can_be_cancelled() {
    let world = World::default();
    let manager = world.open(Options { max_pending: 0, ..options() });
    let held = world.disk.hold_writes();
    let first = save(&manager, 0);
    let second = request(1);
    let cancel = Arc::clone(&second.cancel);
    let started = Instant::now();
    let error = std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            cancel.store(true, Ordering::SeqCst);
        });
        manager.save(second).expect_err("it was cancelled")
    });
    assert_cancelled(Some(&error));
    assert!(started.elapsed() < Duration::from_secs(10));
    held.store(false, Ordering::SeqCst);
    committed(&first);
    assert_eq!(manager.all_steps().unwrap(), [0]);
}

#[test]
fn cancelling_a_save_that_is_captured_changes_nothing() {
    let world = World::default();
    let manager = world.open(options());
    let save = save(&manager, 4);
    save.cancel();
    assert!(matches!(save.wait(Some(LONG)).unwrap(), Some(Outcome::Committed)));
    assert_restores(&manager, 4);
}
