//! Adds an entry to the ledger. The machine does no I/O: it names the next request, and is told
//! the answer. So a model can try every answer at every moment.

use std::sync::Arc;

use super::entry::{Change, Effect, Entry, Nonce};

/// A request to the store. None may be repeated by a library on the way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Request {
    /// The highest number of the ledger.
    Highest,
    /// The entry of a number.
    Get(u64),
    /// Creates an entry, if its number is free.
    Create(Arc<Entry>),
}

/// The answer to a [`Request::Create`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PutOutcome {
    /// It was stored.
    Stored,
    /// The store says that the number is taken, or that somebody else writes it. It may be our own
    /// entry, or none.
    Exists,
    /// No answer, or one that says nothing. It may be stored now, later or never.
    Unknown,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum StoreAnswer {
    /// To [`Request::Highest`]. `None`: the ledger is empty.
    Highest(Option<u64>),
    /// To [`Request::Get`]. `None`: no entry has this number.
    Entry(Option<Arc<Entry>>),
    /// To [`Request::Create`].
    Put(PutOutcome),
    /// A read failed.
    Failed,
}

/// How an append ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum AppendVerdict {
    /// The entry of this number has the change.
    Done(u64),
    /// The change will never be there.
    Never,
    /// An attempt of the change was given up; or the attempt to give up has a name.
    TooLate,
    /// The root belongs to another session. Nothing is said about the change.
    Fenced,
    /// The ledger is empty although this session has an entry: somebody deleted the root.
    Deleted,
    /// The store did not answer in time. The change may be there, or get there as this number.
    Uncertain(Option<u64>),
}

/// The next thing to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Next {
    /// Ask the store.
    Ask(Request),
    /// The end.
    End(AppendVerdict),
}

/// How long the store may go on not to answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Patience {
    /// Requests are repeated.
    Full,
    /// The outcome of what was sent is to be found out, and no more.
    Ending,
    /// Nothing is repeated.
    Over,
}

/// The place of the machine. [`Sent`]: an entry was sent, and may be stored.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// Looks for the highest entry.
    Looking,
    /// Reads the highest entry, which has this number.
    Reading(u64, Option<Sent>),
    /// The entry of this number leads to a verdict, if it is still the highest. A write that lands
    /// late may take a low number that was deleted.
    Confirming(u64, AppendVerdict, Option<Sent>),
    /// Creates an entry.
    Creating(Sent),
    /// Its number was taken: reads whose entry it is.
    Meeting(Sent),
    /// There was none: looks whether others went on, and deleted it since.
    Missing(Sent),
    /// It is stored: looks whether it is the highest.
    Checking(Sent),
}

/// An entry that was sent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Sent {
    /// The entry with the change.
    entry: Arc<Entry>,
    /// Sent in its place when the time was over. It says that the change is not there.
    void: Option<Arc<Entry>>,
}

impl Sent {
    fn latest(&self) -> &Arc<Entry> {
        self.void.as_ref().unwrap_or(&self.entry)
    }
}

/// One change of the ledger under way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Append {
    session: String,
    owner: String,
    change: Change,
    /// Nonces are this one with a counter.
    nonce: Nonce,
    nonces: u32,
    patience: Patience,
    phase: Phase,
    /// The highest entry that the change was last applied to.
    below: Option<Arc<Entry>>,
}

impl Append {
    /// Begins a change. `nonce` is random, and used for nothing else. `owner` names the writer for
    /// people.
    pub fn new(session: &str, owner: &str, change: Change, nonce: Nonce) -> (Self, Request) {
        let append = Self {
            session: session.to_owned(),
            owner: owner.to_owned(),
            change,
            nonce,
            nonces: 0,
            patience: Patience::Full,
            phase: Phase::Looking,
            below: None,
        };
        (append, Request::Highest)
    }

    /// The time is over: from the next answer on, only the outcome of what was sent is found out.
    /// The second call ends that, too.
    pub fn hurry(&mut self) {
        self.patience = match self.patience {
            Patience::Full => Patience::Ending,
            Patience::Ending | Patience::Over => Patience::Over,
        };
    }

    /// Takes the answer to the last request.
    pub fn answered(&mut self, answer: StoreAnswer) -> Next {
        let phase = std::mem::replace(&mut self.phase, Phase::Looking);
        match (phase, answer) {
            (Phase::Looking, StoreAnswer::Highest(None)) => self.apply(None, None),
            (Phase::Looking, StoreAnswer::Highest(Some(number))) => self.ask(Phase::Reading(number, None)),
            // It was deleted meanwhile, because there are many above it.
            (Phase::Reading(_, None), StoreAnswer::Entry(None)) => self.ask(Phase::Looking),
            (Phase::Reading(_, Some(sent)), StoreAnswer::Entry(None)) => self.ask(Phase::Checking(sent)),
            // If what was sent has ever been the highest, those who went on have the change, unless
            // another session took it back.
            (Phase::Reading(_, sent), StoreAnswer::Entry(Some(entry))) => self.apply(Some(entry), sent),
            (Phase::Confirming(number, verdict, sent), StoreAnswer::Highest(highest)) => match highest {
                Some(highest) if highest == number => Next::End(verdict),
                Some(highest) => self.ask(Phase::Reading(highest, sent)),
                None => Next::End(AppendVerdict::Deleted),
            },
            (Phase::Creating(sent), StoreAnswer::Put(outcome)) => match outcome {
                PutOutcome::Stored => self.ask(Phase::Checking(sent)),
                PutOutcome::Exists => self.ask(Phase::Meeting(sent)),
                PutOutcome::Unknown => self.create_again(sent),
            },
            (Phase::Meeting(sent), StoreAnswer::Entry(None)) => self.ask(Phase::Missing(sent)),
            (Phase::Meeting(mut sent), StoreAnswer::Entry(Some(found))) => {
                if found.nonce == sent.entry.nonce {
                    // A void entry that was sent later has no effect.
                    sent.void = None;
                    self.ask(Phase::Checking(sent))
                } else if sent.void.as_ref().is_some_and(|void| void.nonce == found.nonce) {
                    self.ask(Phase::Checking(sent))
                } else {
                    // Another entry has the number. Ours can land no more, or has no effect.
                    self.ask(Phase::Looking)
                }
            }
            (Phase::Missing(sent), StoreAnswer::Highest(highest)) => match highest {
                Some(highest) if highest >= sent.entry.number => {
                    self.ask(Phase::Reading(highest, Some(sent)))
                }
                None if sent.entry.number > 0 => Next::End(AppendVerdict::Deleted),
                _ => self.create_again(sent),
            },
            (Phase::Checking(sent), StoreAnswer::Highest(highest)) => match highest {
                Some(highest) if highest == sent.entry.number && sent.void.is_some() => {
                    Next::End(AppendVerdict::Never)
                }
                Some(highest) if highest == sent.entry.number => Next::End(AppendVerdict::Done(highest)),
                Some(highest) if highest > sent.entry.number => self.ask(Phase::Reading(highest, Some(sent))),
                _ => Next::End(AppendVerdict::Deleted),
            },
            // Another request's answer is none.
            (phase, _) => self.repeat(phase),
        }
    }

    fn ask(&mut self, phase: Phase) -> Next {
        let request = match &phase {
            Phase::Looking | Phase::Confirming(..) | Phase::Missing(_) | Phase::Checking(_) => {
                Request::Highest
            }
            Phase::Reading(number, _) => Request::Get(*number),
            Phase::Creating(sent) => Request::Create(Arc::clone(sent.latest())),
            Phase::Meeting(sent) => Request::Get(sent.entry.number),
        };
        self.phase = phase;
        Next::Ask(request)
    }

    fn repeat(&mut self, phase: Phase) -> Next {
        let (sent, is_confirming) = match &phase {
            Phase::Looking => (None, false),
            Phase::Reading(_, sent) => (sent.as_ref(), false),
            Phase::Confirming(_, _, sent) => (sent.as_ref(), true),
            Phase::Creating(sent) | Phase::Meeting(sent) | Phase::Missing(sent) | Phase::Checking(sent) => {
                (Some(sent), false)
            }
        };
        match self.patience {
            Patience::Ending | Patience::Over if sent.is_none() && !is_confirming => {
                Next::End(AppendVerdict::Never)
            }
            Patience::Over => Next::End(AppendVerdict::Uncertain(sent.map(|sent| sent.entry.number))),
            _ => self.ask(phase),
        }
    }

    /// Sends what was sent once more, which does no harm; or ends its number when the time is over.
    fn create_again(&mut self, mut sent: Sent) -> Next {
        match self.patience {
            Patience::Over => return Next::End(AppendVerdict::Uncertain(Some(sent.entry.number))),
            Patience::Ending if sent.void.is_none() => sent.void = Some(self.void(sent.entry.number)),
            _ => {}
        }
        self.ask(Phase::Creating(sent))
    }

    /// Applies the change to the highest entry.
    fn apply(&mut self, highest: Option<Arc<Entry>>, sent: Option<Sent>) -> Next {
        let effect = self.change.apply(highest.as_deref(), &self.session);
        let (names, given_up) = match (effect, &highest) {
            (Effect::Leads(..), None) if self.patience != Patience::Full => {
                return Next::End(AppendVerdict::Never);
            }
            (Effect::Leads(names, given_up), _) if self.patience == Patience::Full => (names, given_up),
            (_, None) => return Next::End(AppendVerdict::Deleted),
            (effect, Some(entry)) => {
                let verdict = match effect {
                    Effect::Done => AppendVerdict::Done(entry.number),
                    Effect::TooLate => AppendVerdict::TooLate,
                    Effect::Fenced => AppendVerdict::Fenced,
                    Effect::Leads(..) => AppendVerdict::Never,
                };
                return self.ask(Phase::Confirming(entry.number, verdict, sent));
            }
        };
        let is_take_over = matches!(self.change, Change::TakeOver { .. });
        let entry = Entry {
            number: highest.as_ref().map_or(0, |entry| entry.number + 1),
            session: self.session.clone(),
            epoch: highest.as_ref().map_or(0, |entry| entry.epoch + u64::from(is_take_over)),
            owner: self.owner.clone(),
            nonce: self.next_nonce(),
            previous: highest.as_ref().map(|entry| entry.nonce.clone()),
            void: false,
            names,
            given_up,
        };
        self.below = highest;
        self.ask(Phase::Creating(Sent { entry: Arc::new(entry), void: None }))
    }

    /// An entry that says what the one below says.
    fn void(&mut self, number: u64) -> Arc<Entry> {
        let nonce = self.next_nonce();
        let Some(below) = &self.below else {
            // A new root, with no session yet.
            let (names, given_up) = Default::default();
            let (session, owner) = (String::new(), self.owner.clone());
            let (epoch, previous, void) = (0, None, true);
            return Arc::new(Entry { number, session, epoch, owner, nonce, previous, void, names, given_up });
        };
        let previous = Some(below.nonce.clone());
        Arc::new(Entry { number, nonce, previous, void: true, ..Entry::clone(below) })
    }

    fn next_nonce(&mut self) -> Nonce {
        self.nonces += 1;
        format!("{}{:08x}", self.nonce, self.nonces)
    }
}
