//! Engine threads: named, with signals blocked.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, bounded};

/// Poll interval of [`each_polling`].
const EACH_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Starts a thread with signals blocked, except those of the thread's own faults. So the
/// application's handlers run on the application's threads.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    Builder::new().name(name.to_owned()).spawn(move || {
        block_signals();
        body();
    })
}

/// Lets all other threads run and use the disk first. Threads that this one starts do the same.
pub fn lower_priority() {
    const LOWEST_NICE: libc::c_int = 19;
    // `IOPRIO_WHO_PROCESS`, and the lowest level of `IOPRIO_CLASS_BE`: the C library has no names.
    const THIS_THREAD: [libc::c_long; 2] = [1, 0];
    const LOWEST_LEVEL: libc::c_long = (2 << 13) | 7;
    // SAFETY: both calls take numbers only, and change this thread only. If the kernel refuses, the
    // priority stays, which costs time and nothing else.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, LOWEST_NICE);
        libc::syscall(libc::SYS_ioprio_set, THIS_THREAD[0], THIS_THREAD[1], LOWEST_LEVEL);
    }
}

/// Like [`spawn`], for a thread that borrows from its scope.
fn spawn_scoped<'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    body: impl FnOnce() + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, ()>> {
    Builder::new().name(name.to_owned()).spawn_scoped(scope, move || {
        block_signals();
        body();
    })
}

/// Runs two functions, concurrently if `apart` is true.
pub fn both<A: Send, B: Send>(
    name: &str,
    apart: bool,
    first: impl Fn() -> A + Sync,
    second: impl Fn() -> B + Sync,
) -> (A, B) {
    enum Done<A, B> {
        First(A),
        Second(B),
    }
    let work = |&is_first: &bool| if is_first { Done::First(first()) } else { Done::Second(second()) };
    let mut done = each(name, if apart { 2 } else { 1 }, &[true, false], work).into_iter();
    match (done.next(), done.next()) {
        (Some(Done::First(a)), Some(Done::Second(b))) => (a, b),
        _ => (first(), second()),
    }
}

/// Applies a function to every item, on this thread and at most `threads - 1` others. Results are
/// in the order of the items.
pub fn each<I: Sync, T: Send>(
    name: &str,
    threads: usize,
    items: &[I],
    work: impl Fn(&I) -> T + Sync,
) -> Vec<T> {
    let threads = threads.min(items.len());
    if threads < 2 {
        return items.iter().map(work).collect();
    }
    let queue = WorkQueue::new(items, work);
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // Without this thread, the others do the work.
            let _ = spawn_scoped(scope, name, || queue.drain());
        }
        queue.drain();
    });
    queue.answers()
}

/// Like [`each`], on at most `threads` other threads. This thread calls `poll` now and then until
/// all of them have ended.
pub fn each_polling<I: Sync, T: Send>(
    name: &str,
    threads: usize,
    items: &[I],
    work: impl Fn(&I) -> T + Sync,
    poll: &mut dyn FnMut(),
) -> Vec<T> {
    let queue = WorkQueue::new(items, work);
    let (running, ended) = bounded::<()>(0);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(items.len()) {
            let (queue, running) = (&queue, running.clone());
            let drain = move || {
                queue.drain();
                drop(running);
            };
            let _ = spawn_scoped(scope, name, drain);
        }
        drop(running);
        // Nobody sends: the channel is disconnected when all threads have ended.
        while ended.recv_timeout(EACH_POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            poll();
        }
        // Items are left if no thread could be started.
        queue.drain();
    });
    queue.answers()
}

/// Items that several threads take one by one.
struct WorkQueue<'a, I, T, W> {
    items: &'a [I],
    work: W,
    next: AtomicUsize,
    answers: Vec<Mutex<Option<T>>>,
}

impl<'a, I, T, W: Fn(&I) -> T> WorkQueue<'a, I, T, W> {
    fn new(items: &'a [I], work: W) -> Self {
        let answers = items.iter().map(|_| Mutex::new(None)).collect();
        Self { items, work, next: AtomicUsize::new(0), answers }
    }

    /// Works until no item is left.
    fn drain(&self) {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let (Some(item), Some(place)) = (self.items.get(number), self.answers.get(number)) else {
                return;
            };
            let answer = (self.work)(item);
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        }
    }

    /// Returns the results. None is missing: a scope ends when all threads have ended, and panics
    /// if one panicked.
    fn answers(self) -> Vec<T> {
        let answers = self.answers.into_iter();
        answers.filter_map(|answer| answer.into_inner().unwrap_or_else(PoisonError::into_inner)).collect()
    }
}

/// Returns the number of cores that this process may use. Cached: finding it reads a dozen files.
pub fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

fn block_signals() {
    // SAFETY: `sigset_t` is plain data for which zeros are valid; sigfillset then sets all of it.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `all` is a valid sigset_t and outlives the calls; only this thread's mask changes.
    // The signals of faults stay deliverable, so that handlers that report a crash still can.
    unsafe {
        libc::sigfillset(&raw mut all);
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGABRT] {
            libc::sigdelset(&raw mut all, fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
}
