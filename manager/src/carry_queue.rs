//! The steps that a tier is to get, and what became of them. No I/O.

use std::collections::BTreeMap;
use std::time::Duration;

/// The first pause after a failure. Each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause after a failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The most ended steps that are remembered.
const REMEMBERED: usize = 4096;

/// The steps that a tier takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierRule {
    /// Steps with a number that this divides. At least 1.
    pub every: u64,
    /// True for all of them. False: those that still wait are passed over when a newer one is due.
    pub all: bool,
}

impl Default for TierRule {
    fn default() -> Self {
        Self { every: 1, all: false }
    }
}

/// A step that the tier does not have yet.
#[derive(Clone, Debug, Default)]
struct Due {
    phase: CarryPhase,
    /// The tier has an earlier attempt of the step, so it is not passed over.
    replaces: bool,
    failures: u32,
    /// The earliest time of the next try.
    not_before: Duration,
    /// The last failure.
    reason: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum CarryPhase {
    #[default]
    Waits,
    Carried,
    /// It is carried, and was replaced meanwhile.
    CarriedInVain,
    /// It is carried, and was removed meanwhile.
    Removed,
}

/// The end of a step that was due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CarryEnd {
    /// The tier has it.
    Arrived,
    /// It was passed over, because a newer step was due.
    Superseded,
    /// It can never be carried, for this reason.
    GivenUp(String),
}

/// The next task of a carrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// Carry this step.
    Carry(u64),
    /// Wait until that time.
    NotBefore(Duration),
    /// Nothing is due.
    Nothing,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub struct CarryQueue {
    rule: TierRule,
    due: BTreeMap<u64, Due>,
    ended: BTreeMap<u64, CarryEnd>,
    superseded: u64,
}

impl CarryQueue {
    /// The queue of a tier with this rule.
    pub fn new(rule: TierRule) -> Self {
        Self { rule, ..Self::default() }
    }

    /// True if the rule takes a step.
    pub fn takes(&self, step: u64) -> bool {
        step.is_multiple_of(self.rule.every.max(1))
    }

    /// Adds a step that the first tier has committed, if the rule takes it. Older steps that still
    /// wait are passed over, unless the rule wants all. `replaces`: the tier has another attempt.
    pub fn committed(&mut self, step: u64, replaces: bool) {
        if !self.takes(step) {
            return;
        }
        if !self.rule.all {
            let waits = |(&older, due): (&u64, &Due)| {
                (due.phase == CarryPhase::Waits && !due.replaces).then_some(older)
            };
            let older: Vec<u64> = self.due.range(..step).filter_map(waits).collect();
            for older in older {
                self.pass_over(older);
            }
        }
        self.ended.remove(&step);
        let due = self.due.entry(step).or_default();
        let is_carried = due.phase != CarryPhase::Waits;
        let phase = if is_carried { CarryPhase::CarriedInVain } else { CarryPhase::Waits };
        *due = Due { phase, replaces: replaces || due.replaces, ..Due::default() };
    }

    /// Takes the newest step that may be carried at this time. If the rule wants all, it takes the
    /// oldest one, which none overtakes. So a tier has no gaps below its newest step.
    pub fn take(&mut self, now: Duration) -> NextStep {
        let mut waiting: Vec<(&u64, &mut Due)> =
            self.due.iter_mut().filter(|(_, due)| due.phase == CarryPhase::Waits).collect();
        if self.rule.all {
            waiting.truncate(1);
        }
        let mut earliest = NextStep::Nothing;
        for (&step, due) in waiting.into_iter().rev() {
            if due.not_before <= now {
                due.phase = CarryPhase::Carried;
                return NextStep::Carry(step);
            }
            earliest = match earliest {
                NextStep::NotBefore(other) => NextStep::NotBefore(other.min(due.not_before)),
                _ => NextStep::NotBefore(due.not_before),
            };
        }
        earliest
    }

    /// True while the step is carried and still wanted.
    pub fn is_wanted(&self, step: u64) -> bool {
        self.due.get(&step).is_some_and(|due| due.phase == CarryPhase::Carried)
    }

    /// Records the end of a step that was carried.
    pub fn ended(&mut self, step: u64, end: CarryEnd) {
        if !self.stop_carrying(step) {
            return;
        }
        self.due.remove(&step);
        if matches!(end, CarryEnd::GivenUp(_)) && self.due.is_empty() {
            // The step that it took the place of is better than none.
            let passed_over = |(_, end): &(&u64, &CarryEnd)| **end == CarryEnd::Superseded;
            if let Some((&older, _)) = self.ended.range(..step).rev().find(passed_over) {
                self.ended.remove(&older);
                self.due.insert(older, Due::default());
            }
        }
        self.end(step, end);
    }

    /// Records a failure that may pass. The step is tried again later, unless a newer one is due.
    pub fn failed(&mut self, step: u64, reason: String, now: Duration) {
        if !self.stop_carrying(step) {
            return;
        }
        let is_kept = self.rule.all || self.due.get(&step).is_some_and(|due| due.replaces);
        if !is_kept && self.due.range(step + 1..).next().is_some() {
            self.pass_over(step);
        } else if let Some(due) = self.due.get_mut(&step) {
            let pause = FIRST_PAUSE.saturating_mul(1 << due.failures.min(6)).min(LONGEST_PAUSE);
            due.failures += 1;
            due.not_before = now.saturating_add(pause);
            due.reason = Some(reason);
        }
    }

    /// Forgets steps that are removed. Returns true if one of them is carried: it ends soon.
    pub fn forget(&mut self, is_removed: impl Fn(u64) -> bool) -> bool {
        self.ended.retain(|&step, _| !is_removed(step));
        self.due.retain(|&step, due| due.phase != CarryPhase::Waits || !is_removed(step));
        let mut is_carried = false;
        for (_, due) in self.due.iter_mut().filter(|(step, _)| is_removed(**step)) {
            due.phase = CarryPhase::Removed;
            is_carried = true;
        }
        is_carried
    }

    /// Returns the step to carry when little time is left: the newest one, with its bytes. If it
    /// does not fit into the bytes that can still be carried, and a started step has fewer bytes
    /// left, that one.
    pub fn most_useful(&self, newest: (u64, u64), left_of_carried: u64, affordable: u64) -> u64 {
        let (newest, bytes) = newest;
        let started = self.carried().filter(|&step| self.is_wanted(step));
        match started {
            Some(started) if bytes > affordable && left_of_carried < bytes => started,
            _ => newest,
        }
    }

    /// Makes a step the only one that is due, at once. All others are passed over, also one that is
    /// carried.
    pub fn carry_only(&mut self, step: u64) {
        let others: Vec<u64> = self.due().filter(|&other| other != step).collect();
        for other in others {
            match self.due.get_mut(&other) {
                Some(due) if due.phase != CarryPhase::Waits => {
                    due.phase = CarryPhase::Removed;
                    self.superseded += 1;
                    self.end(other, CarryEnd::Superseded);
                }
                _ => self.pass_over(other),
            }
        }
        self.ended.remove(&step);
        self.due.entry(step).or_default().not_before = Duration::ZERO;
    }

    /// Returns the steps that the first tier has to keep.
    pub fn due(&self) -> impl Iterator<Item = u64> {
        self.due.keys().copied()
    }

    /// Returns the step that is carried.
    pub fn carried(&self) -> Option<u64> {
        self.due.iter().find(|(_, due)| due.phase != CarryPhase::Waits).map(|(&step, _)| step)
    }

    /// Returns how a step has ended.
    pub fn end_of(&self, step: u64) -> Option<&CarryEnd> {
        self.ended.get(&step)
    }

    /// Returns the last failure of the newest step that has failed and is tried again.
    pub fn failure(&self) -> Option<(u64, &str)> {
        self.due.iter().rev().find_map(|(&step, due)| Some((step, due.reason.as_deref()?)))
    }

    /// Returns how often a due step has failed.
    pub fn failures(&self, step: u64) -> u32 {
        self.due.get(&step).map_or(0, |due| due.failures)
    }

    /// Returns the number of steps that were passed over.
    pub fn superseded(&self) -> u64 {
        self.superseded
    }

    /// Ends the carrying of a step. Returns false if it was replaced or removed meanwhile.
    fn stop_carrying(&mut self, step: u64) -> bool {
        let Some(due) = self.due.get_mut(&step) else { return false };
        match std::mem::take(&mut due.phase) {
            CarryPhase::Removed => {
                self.due.remove(&step);
                false
            }
            CarryPhase::CarriedInVain => false,
            CarryPhase::Carried | CarryPhase::Waits => true,
        }
    }

    fn pass_over(&mut self, step: u64) {
        self.due.remove(&step);
        self.superseded += 1;
        self.end(step, CarryEnd::Superseded);
    }

    fn end(&mut self, step: u64, end: CarryEnd) {
        self.ended.insert(step, end);
        while self.ended.len() > REMEMBERED {
            self.ended.pop_first();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(100);

    fn queue(every: u64, all: bool) -> CarryQueue {
        CarryQueue::new(TierRule { every, all })
    }

    fn due(queue: &CarryQueue) -> Vec<u64> {
        queue.due().collect()
    }

    #[test]
    fn the_rule_says_which_steps_are_due() {
        let mut queue = queue(10, true);
        (0..=30).for_each(|step| queue.committed(step, false));
        assert_eq!(due(&queue), [0, 10, 20, 30]);
        assert_eq!(queue.take(NOW), NextStep::Carry(0), "the oldest first");
        queue.failed(0, "no answer".to_owned(), NOW);
        assert!(matches!(queue.take(NOW), NextStep::NotBefore(_)), "none overtakes it");
    }

    #[test]
    fn a_newer_step_takes_the_place_of_those_that_wait() {
        let mut queue = queue(1, false);
        queue.committed(1, false);
        assert_eq!(queue.take(NOW), NextStep::Carry(1));
        queue.committed(2, false);
        queue.committed(3, false);
        assert_eq!(due(&queue), [1, 3], "what is carried goes on");
        assert_eq!((queue.end_of(2), queue.superseded()), (Some(&CarryEnd::Superseded), 1));
        queue.ended(1, CarryEnd::Arrived);
        assert_eq!(
            (queue.end_of(1).cloned(), queue.take(NOW)),
            (Some(CarryEnd::Arrived), NextStep::Carry(3))
        );
    }

    #[test]
    fn a_failed_step_is_tried_again_after_longer_and_longer_pauses() {
        let (mut queue, mut now) = (queue(1, false), NOW);
        queue.committed(1, false);
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(queue.take(now), NextStep::Carry(1));
            queue.failed(1, "no answer".to_owned(), now);
            let then = now + Duration::from_secs(pause);
            assert_eq!(queue.take(now), NextStep::NotBefore(then));
            assert_eq!(queue.failure(), Some((1, "no answer")));
            now = then;
        }
        queue.committed(2, false);
        assert_eq!(due(&queue), [2]);
    }

    #[test]
    fn a_removed_step_is_not_due_any_more() {
        let mut queue = queue(1, true);
        (1..=3).for_each(|step| queue.committed(step, false));
        assert_eq!(queue.take(NOW), NextStep::Carry(1));
        assert!(!queue.forget(|step| step == 3));
        assert!(queue.forget(|step| step == 1) && !queue.is_wanted(1));
        assert_eq!(due(&queue), [1, 2], "until the carrier has stopped");
        queue.ended(1, CarryEnd::Arrived);
        assert_eq!((due(&queue), queue.end_of(1)), (vec![2], None));
    }

    #[test]
    fn a_step_that_replaces_another_is_not_passed_over() {
        let mut queue = queue(1, false);
        queue.committed(1, true);
        queue.committed(2, false);
        assert_eq!((due(&queue), queue.take(NOW)), (vec![1, 2], NextStep::Carry(2)));
        assert_eq!(queue.take(NOW), NextStep::Carry(1));
        queue.failed(1, "no answer".to_owned(), NOW);
        assert_eq!(due(&queue), [1, 2]);
    }

    #[test]
    fn a_step_that_is_given_up_gives_its_place_back() {
        let mut queue = queue(1, false);
        (1..=3).for_each(|step| queue.committed(step, false));
        assert_eq!(queue.take(NOW), NextStep::Carry(3));
        queue.ended(3, CarryEnd::GivenUp("damaged".to_owned()));
        assert_eq!(queue.take(NOW), NextStep::Carry(2));
    }

    #[test]
    fn a_step_that_is_carried_alone_takes_the_place_of_all_others() {
        let mut queue = queue(10, true);
        for step in [10, 20, 30] {
            queue.committed(step, false);
        }
        assert_eq!(queue.take(NOW), NextStep::Carry(10));
        queue.carry_only(31);
        assert!(!queue.is_wanted(10));
        assert_eq!(due(&queue), [10, 31], "until the carrier has stopped");
        queue.ended(10, CarryEnd::Arrived);
        assert_eq!((queue.superseded(), queue.end_of(10)), (3, Some(&CarryEnd::Superseded)));
        assert_eq!(queue.take(NOW), NextStep::Carry(31));
        queue.failed(31, "no answer".to_owned(), NOW);
        queue.carry_only(31);
        assert_eq!(queue.take(NOW), NextStep::Carry(31), "without the pause after a failure");
    }

    #[test]
    fn a_started_step_is_finished_if_the_newest_does_not_fit() {
        let mut queue = queue(1, false);
        assert_eq!(queue.most_useful((2, 100), 0, 10), 2, "none was started");
        queue.committed(1, false);
        queue.take(NOW);
        for (left, affordable, chosen) in
            [(50, 100, 2), (50, 99, 1), (50, 10, 1), (100, 10, 2), (u64::MAX, 10, 2)]
        {
            assert_eq!(queue.most_useful((2, 100), left, affordable), chosen, "{left} {affordable}");
        }
        queue.committed(1, false);
        assert_eq!(queue.most_useful((2, 100), 50, 99), 2, "what is carried was replaced");
    }

    #[test]
    fn a_step_that_is_replaced_while_it_is_carried_is_carried_again() {
        let mut queue = queue(1, false);
        queue.committed(1, false);
        assert_eq!(queue.take(NOW), NextStep::Carry(1));
        queue.committed(1, false);
        assert!(!queue.is_wanted(1));
        queue.ended(1, CarryEnd::Arrived);
        assert_eq!((queue.end_of(1).cloned(), queue.take(NOW)), (None, NextStep::Carry(1)));
    }
}
