//! Runs `saver` under `strace`, which kills it or feeds it errors at chosen system calls.
//!
//! The tracer attaches when the program is ready, so its counts begin there, at zero in every
//! thread: the n-th call is the n-th of a thread since the sweep began. If several threads reach an
//! n-th call, it is injected into each of them; the log has the number.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than any run on any machine: a later process hangs.
const PATIENCE: Duration = Duration::from_secs(90);

/// The program, and how it is run.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Path of the `saver` binary.
    pub program: PathBuf,
    /// `STEPWELL_ENGINE`.
    pub engine: &'static str,
    /// The directory for logs.
    pub scratch: PathBuf,
}

/// The output of a run.
#[derive(Debug, Default)]
pub struct Ran {
    /// Standard output, without `ready`.
    pub lines: Vec<String>,
    /// Standard error.
    pub errors: String,
    /// True if it ended by itself, successfully.
    pub succeeded: bool,
    /// Lines of the trace at which something was injected.
    pub injected: Vec<String>,
    /// The whole trace.
    pub trace: String,
}

impl Ran {
    /// The steps that were acknowledged.
    pub fn committed(&self) -> Vec<u64> {
        let steps = self.lines.iter().filter_map(|line| line.strip_prefix("committed "));
        steps.filter_map(|step| step.parse().ok()).collect()
    }
}

/// Why nothing can be injected here; `None` where it can.
pub fn unavailable(subject: &Subject) -> Option<String> {
    if let Err(error) = Command::new("strace").arg("-V").stdout(Stdio::null()).status() {
        return Some(format!("strace does not run here ({error})"));
    }
    let root = subject.scratch.join("try");
    let tried = run(subject, &root, 1, 1, &["-e", "trace=fsync"]);
    let _ = std::fs::remove_dir_all(&root);
    match tried {
        Ok(ran) if ran.lines.last().is_some_and(|line| line == "closed") => None,
        Ok(ran) => Some(format!("the program does not run under strace here: {ran:?}")),
        Err(error) => Some(format!("strace cannot attach to a process here ({error})")),
    }
}

/// Ends a process and waits for it, whatever happens to the test.
struct Owned(Child);

impl Drop for Owned {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Owned {
    fn wait(&mut self, until: Instant) -> Result<bool, String> {
        loop {
            match self.0.try_wait() {
                Ok(Some(status)) => return Ok(status.success()),
                Ok(None) if Instant::now() > until => return Err("it hangs".to_owned()),
                Ok(None) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

/// Runs the program under `strace` with these arguments. Every call needs a `root` of its own: its
/// name tells the logs apart.
pub fn run(subject: &Subject, root: &Path, first: u64, steps: u64, strace: &[&str]) -> Result<Ran, String> {
    let io = |error: std::io::Error| error.to_string();
    let name = root.file_name().and_then(|name| name.to_str()).ok_or("a root needs a name")?;
    let log = subject.scratch.join(format!("{name}.trace"));
    let errors = subject.scratch.join(format!("{name}.errors"));
    let mut program = Command::new(&subject.program)
        .arg(root)
        .args([first.to_string(), steps.to_string(), "wait".to_owned()])
        .env("STEPWELL_ENGINE", subject.engine)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(File::create(&errors).map_err(io)?)
        .spawn()
        .map(Owned)
        .map_err(io)?;
    let mut output = BufReader::new(program.0.stdout.take().ok_or("no output")?);
    let mut ready = String::new();
    output.read_line(&mut ready).map_err(io)?;
    let pid = program.0.id();
    let mut tracer = Command::new("strace")
        .args(["-f", "-qq", "-o"])
        .arg(&log)
        .args(strace)
        .args(["-p", &pid.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map(Owned)
        .map_err(io)?;
    let until = Instant::now() + Duration::from_secs(20);
    // The call that it waits in is counted when it is attached to: a kill at the first `read` comes
    // before anybody can look.
    let is_over = |program: &mut Owned| program.0.try_wait().map_err(io).map(|status| status.is_some());
    while !is_traced(pid) && !is_over(&mut program)? {
        let unattached = tracer.0.try_wait().map_err(io)?.is_some() && !is_over(&mut program)?;
        if Instant::now() > until || unattached {
            return Err("it could not be attached to".to_owned());
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    match program.0.stdin.take().ok_or("no input")?.write_all(b"\n") {
        Err(error) if !is_over(&mut program)? => return Err(io(error)),
        _ => {}
    }
    let ended = program.wait(Instant::now() + PATIENCE);
    if ended.is_err() {
        let trace = std::fs::read_to_string(&log).unwrap_or_default();
        let tail: Vec<&str> = trace.lines().rev().take(40).collect();
        return Err(format!("it hangs; the end of its trace, backwards: {tail:#?}"));
    }
    tracer.wait(Instant::now() + Duration::from_secs(20)).map_err(|_| "strace did not end".to_owned())?;
    let mut text = String::new();
    output.read_to_string(&mut text).map_err(io)?;
    let trace = std::fs::read(&log).map_err(io)?;
    let trace = String::from_utf8_lossy(&trace).into_owned();
    let ran = Ran {
        lines: text.lines().map(str::to_owned).collect(),
        errors: std::fs::read_to_string(&errors).map_err(io)?,
        succeeded: ended == Ok(true),
        injected: trace.lines().filter(|line| line.contains("(INJECTED)")).map(str::to_owned).collect(),
        trace,
    };
    let _ = std::fs::remove_file(&log);
    let _ = std::fs::remove_file(&errors);
    Ok(ran)
}

fn is_traced(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    tracer.is_some_and(|tracer| tracer.trim() != "0")
}

/// How often each system call is made, at most, by one thread of a run since it was attached to.
pub fn calls(ran: &Ran) -> BTreeMap<String, u64> {
    let mut seen: HashMap<(&str, &str), u64> = HashMap::new();
    for line in ran.trace.lines() {
        let Some((thread, rest)) = line.split_once(' ') else { continue };
        let Some((call, _)) = rest.trim_start().split_once('(') else { continue };
        if !call.is_empty() && call.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
        {
            *seen.entry((thread, call)).or_default() += 1;
        }
    }
    let mut most = BTreeMap::new();
    for ((_, call), count) in seen {
        let entry = most.entry(call.to_owned()).or_insert(0);
        *entry = count.max(*entry);
    }
    most
}
