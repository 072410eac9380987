//! Engine threads: named, and deaf to signals.

use std::io;
use std::sync::OnceLock;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// Starts a thread in which signals are blocked (but for those that a fault of its own raises), so that the application's handlers run on the application's threads.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    Builder::new().name(name.to_owned()).spawn(move || {
        block_signals();
        body();
    })
}

/// [`spawn`] for a thread that borrows from its scope.
pub fn spawn_scoped<'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    body: impl FnOnce() + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, ()>> {
    Builder::new().name(name.to_owned()).spawn_scoped(scope, move || {
        block_signals();
        body();
    })
}

/// Cores that this process may use. Asked for once: the answer costs a dozen files.
pub fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

fn block_signals() {
    // SAFETY: `sigset_t` is plain data for which zeros are valid; sigfillset then sets all of it.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `all` is a valid sigset_t and outlives the calls; only this thread's mask changes. The signals of faults stay deliverable, so
    // that handlers that report a crash still can.
    unsafe {
        libc::sigfillset(&raw mut all);
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGABRT] {
            libc::sigdelset(&raw mut all, fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
}
