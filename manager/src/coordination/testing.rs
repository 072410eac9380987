//! Ranks as threads of one process, for tests.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::{Coordinator, Message};
use crate::error::Result;

#[derive(Default)]
struct Messages {
    messages: Mutex<HashMap<String, Message>>,
    changed: Condvar,
}

/// One rank of a group of threads.
pub struct InProcess {
    rank: u32,
    world_size: u32,
    /// Ranks on one pretended machine.
    per_node: u32,
    board: Arc<Messages>,
    namespaces: AtomicU64,
}

impl InProcess {
    /// Returns all ranks, in order, on machines of `per_node` ranks.
    pub fn ranks(world_size: u32, per_node: u32) -> Vec<Self> {
        let board = Arc::new(Messages::default());
        let rank = |rank| Self {
            rank,
            world_size,
            per_node: per_node.max(1),
            board: Arc::clone(&board),
            namespaces: AtomicU64::new(0),
        };
        (0..world_size).map(rank).collect()
    }

    /// Returns the keys of the messages that are left.
    pub fn left(&self) -> Vec<String> {
        let messages = self.board.messages.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left: Vec<String> = messages.keys().cloned().collect();
        left.sort_unstable();
        left
    }
}

impl Coordinator for InProcess {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    fn namespace(&self) -> String {
        self.namespaces.fetch_add(1, Ordering::Relaxed).to_string()
    }

    fn put(&self, key: &str, message: &[u8]) -> Result<()> {
        let mut messages = self.board.messages.lock().unwrap_or_else(PoisonError::into_inner);
        messages.insert(key.to_owned(), message.to_vec());
        drop(messages);
        self.board.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Message>> {
        let messages = self.board.messages.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .board
            .changed
            .wait_timeout_while(messages, timeout, |messages| !messages.contains_key(key))
            .unwrap_or_else(PoisonError::into_inner);
        Ok(waited.0.get(key).cloned())
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.board.messages.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
        Ok(())
    }

    fn node(&self) -> String {
        format!("node-{}", self.rank / self.per_node)
    }

    /// Two ranks share a socket.
    fn socket(&self) -> Option<u32> {
        Some(self.rank / 2)
    }
}
