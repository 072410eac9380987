//! Process-wide actions of tests: forbid system calls, fork. Each such test runs in its own process
//! (see `io::tests`).

use std::io;

/// Reports that the subject of a test is absent on this machine. Prints to standard error directly,
/// because the harness hides the output of passing tests.
///
/// # Panics
///
/// If `STEPWELL_REQUIRE`, a comma list of subjects, requires it.
pub fn absent(subject: &str, why: &dyn std::fmt::Display) {
    let required = std::env::var("STEPWELL_REQUIRE").unwrap_or_default();
    assert!(
        required.split(',').all(|one| one != subject),
        "{subject} is required (STEPWELL_REQUIRE={required}), and absent: {why}"
    );
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    let line = format_args!("SKIPPED {name}: {subject} is absent: {why}\n");
    let _ = io::Write::write_fmt(&mut io::stderr(), line);
}

/// Makes system call `number` fail with `errno`, from now on, in this thread and threads that it
/// starts.
pub fn refuse_syscall(number: libc::c_long, errno: i32) -> io::Result<()> {
    let statement = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let number = u32::try_from(number).map_err(io::Error::other)?;
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // the number of the call
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, number, 0, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno.unsigned_abs(), 0, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its filter outlive the call, which copies them.
    let answer = unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 {
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
        } else {
            -1
        }
    };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Forks. The child runs `body` and exits with its result, without destructors and without the test
/// harness.
pub fn fork(body: impl FnOnce() -> i32) -> io::Result<Child> {
    // SAFETY: the C library makes its own state (including malloc) usable in the child. The test's
    // process has no other busy threads.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(101);
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(code) }
        }
        pid => Ok(Child(pid)),
    }
}

/// A forked child.
pub struct Child(libc::pid_t);

impl Child {
    /// Returns the exit code, or the negative number of the signal that ended the child.
    pub fn wait(self) -> io::Result<i32> {
        let mut status = 0;
        // SAFETY: `status` outlives the call.
        if unsafe { libc::waitpid(self.0, &raw mut status, 0) } != self.0 {
            return Err(io::Error::last_os_error());
        }
        Ok(if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -libc::WTERMSIG(status) })
    }
}
