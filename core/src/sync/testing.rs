//! The same names under [shuttle], for tests of interleavings.
//!
//! No wait times out here. A thread that is never woken stays blocked, and shuttle reports a
//! deadlock, so no deadline can hide a lost wake-up.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, LockResult, PoisonError};
use std::time::Duration;

pub use crossbeam_channel::{RecvError, RecvTimeoutError, SendError, TryRecvError};
pub use shuttle;
pub use shuttle::sync::atomic::{AtomicBool, AtomicUsize};
pub use shuttle::sync::{Mutex, MutexGuard, WaitTimeoutResult};
pub use shuttle::thread::JoinHandle;

thread_local! {
    static DEAF: Cell<bool> = const { Cell::new(false) };
}

/// From now on nobody who waits for a condition is woken, in the tests of this thread: a defect, to
/// show that it would be found.
pub fn lose_wake_ups() {
    DEAF.set(true);
}

/// A condition that can be made deaf.
#[derive(Debug, Default)]
pub struct Condvar(shuttle::sync::Condvar);

impl Condvar {
    /// As the standard library's.
    pub const fn new() -> Self {
        Self(shuttle::sync::Condvar::new())
    }

    /// As the standard library's.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        self.0.wait(guard)
    }

    /// The same: no wait times out.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        self.0.wait_timeout(guard, timeout)
    }

    /// As the standard library's, unless wake-ups are lost.
    pub fn notify_all(&self) {
        if !DEAF.get() {
            self.0.notify_all();
        }
    }
}

/// A thread of the scheduler's.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    shuttle::thread::Builder::new().name(name.to_owned()).spawn(body)
}

/// A channel for many senders and many receivers, as crossbeam's, of which shuttle has none.
pub fn unbounded<T>() -> (Sender<T>, Receiver<T>) {
    let state = ChannelState { messages: VecDeque::new(), senders: 1, receivers: 1 };
    let channel = Arc::new(Channel { state: Mutex::new(state), changed: shuttle::sync::Condvar::new() });
    (Sender(Arc::clone(&channel)), Receiver(channel))
}

struct Channel<T> {
    state: Mutex<ChannelState<T>>,
    changed: shuttle::sync::Condvar,
}

struct ChannelState<T> {
    messages: VecDeque<T>,
    senders: usize,
    receivers: usize,
}

impl<T> Channel<T> {
    fn lock(&self) -> MutexGuard<'_, ChannelState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One end of a channel.
pub struct Sender<T>(Arc<Channel<T>>);

/// The other end.
pub struct Receiver<T>(Arc<Channel<T>>);

impl<T> Sender<T> {
    /// Puts a message in, unless nobody can take it out any more.
    pub fn send(&self, message: T) -> Result<(), SendError<T>> {
        let mut state = self.0.lock();
        if state.receivers == 0 {
            return Err(SendError(message));
        }
        state.messages.push_back(message);
        drop(state);
        self.0.changed.notify_all();
        Ok(())
    }
}

impl<T> Receiver<T> {
    /// Takes a message out, if there is one.
    pub fn try_recv(&self) -> Result<T, TryRecvError> {
        let mut state = self.0.lock();
        match state.messages.pop_front() {
            Some(message) => Ok(message),
            None if state.senders == 0 => Err(TryRecvError::Disconnected),
            None => Err(TryRecvError::Empty),
        }
    }

    /// Waits for a message, or for the last sender to go.
    pub fn recv(&self) -> Result<T, RecvError> {
        let mut state = self.0.lock();
        loop {
            if let Some(message) = state.messages.pop_front() {
                return Ok(message);
            }
            if state.senders == 0 {
                return Err(RecvError);
            }
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The same: see the module documentation.
    pub fn recv_timeout(&self, _: Duration) -> Result<T, RecvTimeoutError> {
        self.recv().map_err(|RecvError| RecvTimeoutError::Disconnected)
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.lock().senders += 1;
        Self(Arc::clone(&self.0))
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        self.0.lock().receivers += 1;
        Self(Arc::clone(&self.0))
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.lock().senders -= 1;
        self.0.changed.notify_all();
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.receivers -= 1;
        // Messages without receivers are dropped outside of the lock: a message may be anything.
        let left = if state.receivers == 0 { std::mem::take(&mut state.messages) } else { VecDeque::new() };
        drop(state);
        drop(left);
    }
}
