//! Credentials of an object store that a function of the user gives. A thread of Python calls that
//! function. The engine's threads only wait for its answer.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;

use stepwell_core::remote::cloud::{CredentialParts, CredentialSource};

use crate::wait;

/// The longest wait for the user's function.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Parts of credentials by name, and the seconds that they are valid.
type Answer = Result<(BTreeMap<String, String>, Option<f64>), String>;

#[derive(Debug, Default)]
enum Question {
    #[default]
    None,
    Asked,
    Answered(Answer),
}

#[derive(Debug, Default)]
struct Desk {
    /// Held by the store that asks: two stores may have one function.
    turn: Mutex<()>,
    question: Mutex<Question>,
    changed: Condvar,
}

impl Desk {
    fn question(&self) -> MutexGuard<'_, Question> {
        self.question.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, question: Question) {
        *self.question() = question;
        self.changed.notify_all();
    }
}

/// Questions for credentials, and their answers.
#[pyclass(frozen, module = "stepwell._core")]
#[derive(Default)]
pub struct Credentials {
    desk: Arc<Desk>,
}

#[pymethods]
impl Credentials {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Waits, detached, until the engine wants credentials.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let asked = |interval: Duration| {
            let question = self.desk.question();
            let is_none = |question: &mut Question| !matches!(question, Question::Asked);
            let waited = self.desk.changed.wait_timeout_while(question, interval, is_none);
            let (mut question, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            (!timeout.timed_out()).then(|| *question = Question::None)
        };
        wait::poll(py, None, asked).map(drop)
    }

    /// Gives credentials, by the names of their parts, and the seconds that they are valid.
    fn answer(&self, parts: BTreeMap<String, String>, valid_seconds: Option<f64>) {
        self.desk.set(Question::Answered(Ok((parts, valid_seconds))));
    }

    /// Says why there are none.
    fn fail(&self, why: String) {
        self.desk.set(Question::Answered(Err(why)));
    }
}

impl Credentials {
    /// The source that the engine asks.
    pub fn source(&self) -> Arc<dyn CredentialSource> {
        Arc::clone(&self.desk) as _
    }
}

impl CredentialSource for Desk {
    fn fetch(&self) -> Result<CredentialParts, String> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.set(Question::Asked);
        let is_open = |question: &mut Question| !matches!(question, Question::Answered(_));
        let waited = self.changed.wait_timeout_while(self.question(), ANSWER_TIMEOUT, is_open);
        let (mut question, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match std::mem::take(&mut *question) {
            Question::Answered(answer) => {
                let (parts, seconds) = answer?;
                let valid_for =
                    seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok());
                Ok(CredentialParts { parts, valid_for })
            }
            _ => Err(format!("the function has not returned within {} s", ANSWER_TIMEOUT.as_secs())),
        }
    }
}
