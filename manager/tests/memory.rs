//! Staging memory that there is not.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests end by it")]

mod common;

use std::process::Command;

use common::*;
use stepwell_core::sys::total_memory;
use stepwell_manager::{Advice, Manager, Options};

#[test]
fn more_staging_memory_than_the_machine_has_is_refused() {
    let there = total_memory().unwrap();
    for bytes in [there + 1, 1_000_000_000_000_000, u64::MAX] {
        let world = World::default();
        let error = world.try_open(Options { staging_bytes: Some(bytes), ..options() }).err().unwrap();
        assert_eq!(error.kind(), "invalid");
        let text = error.to_string();
        assert!(text.contains(&format!("staging_bytes={bytes}")), "{text}");
        assert!(text.contains(&format!("{there} bytes")), "{text}");
        assert!(world.disk.image().get(ROOT).is_none());
    }
    drop(World::default().open(Options { staging_bytes: Some(there), ..options() }));
}

/// In a process of its own: the limit is the process's.
#[test]
fn a_ring_is_made_smaller_or_refused_by_name() {
    let itself = std::env::current_exe().unwrap();
    let script = "ulimit -v 700000 && exec \"$0\" --ignored --exact --test-threads=1 below_a_limit";
    let answer = Command::new("sh").arg("-c").arg(script).arg(itself).output().unwrap();
    let said = String::from_utf8_lossy(&answer.stdout);
    assert!(answer.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "run by the test above it, with less memory than it asks for"]
fn below_a_limit() {
    let world = World::default();
    let open = |staging_bytes: Option<u64>| -> Manager { world.open(Options { staging_bytes, ..options() }) };
    let manager = open(Some(1 << 30));
    let error = manager.save(request(1)).unwrap_err();
    assert_eq!((error.kind(), error.errno()), ("io", Some(12)));
    let text = error.to_string();
    assert!(text.contains("staging ring of 1073741824 bytes"), "{text}");
    assert_eq!(error.advice(), Some(Advice::LessStaging));
    manager.close(Some(LONG)).unwrap();
    // Without a requested size, a smaller ring is enough.
    let manager = open(None);
    manager.prepare(64 << 30, &[]).unwrap();
    commit(&manager, 1);
    assert_restores(&manager, 1);
    manager.close(Some(LONG)).unwrap();
}
