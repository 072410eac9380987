//! The threads that help to capture.

use std::sync::Mutex;
use std::sync::mpsc;

use super::*;
use crate::provider::Fill;
use crate::staging::{Filling, Slot};

/// Tells which threads captured.
struct Named(Mutex<mpsc::Sender<String>>);
impl StateProvider for Named {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> Result<()> {
        for fill in fills {
            slot.part(fill.at, fill.len)?.fill(1);
        }
        std::thread::sleep(Duration::from_millis(1));
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        self.0.lock().unwrap().send(name).unwrap();
        Ok(())
    }
}

#[test]
fn helpers_end_with_their_pool() {
    let (sender, receiver) = mpsc::channel();
    let ring = pool(4, BLOCK);
    let leaf = tensor_leaf(60 * BLOCK, Arc::new(Named(Mutex::new(sender))));
    save(
        vec![item("i0", vec![leaf])],
        &ring,
        SaveOptions { capture_threads: 3, ..options(1) },
        &SimDisk::new(),
    );
    let names: Vec<String> = receiver.iter().collect();
    assert!(names.iter().any(|name| name.starts_with("stepwell-copy-")), "{names:?}");
    let watched = Arc::downgrade(&ring);
    drop(ring);
    assert!(watched.upgrade().is_none(), "something still holds the pool");
}
