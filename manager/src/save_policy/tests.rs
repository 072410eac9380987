use std::collections::BTreeMap;

use super::*;

/// All facts, known beforehand.
#[derive(Clone, Default)]
struct Context {
    step: u64,
    latest: Option<u64>,
    seconds_since_save: Option<f64>,
    saving: bool,
    preempted: bool,
    custom: BTreeMap<String, bool>,
}

impl Facts for Context {
    fn step(&self) -> u64 {
        self.step
    }

    fn is_first(&self) -> Result<bool> {
        Ok(self.latest.is_none())
    }

    fn seconds_since_save(&self) -> Result<Option<f64>> {
        Ok(self.seconds_since_save)
    }

    fn saving(&self) -> bool {
        self.saving
    }

    fn preempted(&self) -> bool {
        self.preempted
    }

    fn custom(&self, name: &str) -> bool {
        self.custom.get(name).copied().unwrap_or(false)
    }
}

/// A policy that asks these for more than the step is no policy of steps alone.
struct StepOnly(u64);

impl Facts for StepOnly {
    fn step(&self) -> u64 {
        self.0
    }

    fn is_first(&self) -> Result<bool> {
        Err(Error::Invalid("the root was looked at".into()))
    }

    fn seconds_since_save(&self) -> Result<Option<f64>> {
        Err(Error::Invalid("the root was looked at".into()))
    }

    fn saving(&self) -> bool {
        panic!("it asked")
    }

    fn preempted(&self) -> bool {
        panic!("it asked")
    }

    fn custom(&self, _: &str) -> bool {
        panic!("it asked")
    }
}

#[test]
fn a_deterministic_policy_asks_for_the_step_only() {
    let policy = SavePolicy::EverySteps { n: 2, initial: false } | SavePolicy::at_steps([7]);
    assert!(policy.is_deterministic());
    let answers: Vec<bool> = (6..9).map(|step| policy.should_save(&StepOnly(step)).unwrap()).collect();
    assert_eq!(answers, [true, true, true]);
    assert!(!policy.should_save(&StepOnly(5)).unwrap());
    assert!(SavePolicy::every_steps(2).should_save(&StepOnly(6)).unwrap());
    assert!(SavePolicy::every_steps(2).should_save(&StepOnly(5)).is_err());
    // An expensive look is skipped if the answer is known already.
    let both = SavePolicy::at_steps([7]) & SavePolicy::every_seconds(3.0);
    assert!(!both.should_save(&StepOnly(6)).unwrap() && both.should_save(&StepOnly(7)).is_err());
}

/// The steps that a policy saves, if `save` is called for each of them in turn.
fn saved(policy: &SavePolicy, steps: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let mut context = Context::default();
    steps
        .into_iter()
        .filter(|&step| {
            context.step = step;
            let yes = policy.should_save(&context).unwrap();
            if yes {
                context.latest = Some(step);
            }
            yes
        })
        .collect()
}

#[test]
fn an_interval_saves_its_multiples() {
    assert_eq!(saved(&SavePolicy::every_steps(2), 0..6), [0, 2, 4]);
}

#[test]
fn the_first_step_of_an_empty_root_is_saved_whatever_its_number() {
    assert_eq!(saved(&SavePolicy::every_steps(2), 1..6), [1, 2, 4]);
    assert_eq!(saved(&SavePolicy::EverySteps { n: 2, initial: false }, 1..6), [2, 4]);
}

#[test]
fn listed_steps_are_saved_and_no_others() {
    assert_eq!(saved(&SavePolicy::at_steps([1, 3, 5]), 0..8), [1, 3, 5]);
    assert_eq!(saved(&(SavePolicy::at_steps([1, 3, 5]) | SavePolicy::every_steps(100)), 0..8), [0, 1, 3, 5]);
}

#[test]
fn alternatives_unite_and_conditions_intersect() {
    let either = SavePolicy::EverySteps { n: 3, initial: false } | SavePolicy::at_steps([4, 5, 10]);
    assert_eq!(saved(&either, 3..11), [3, 4, 5, 6, 9, 10]);
    let both = SavePolicy::every_steps(2) & SavePolicy::EverySteps { n: 3, initial: false };
    assert_eq!(saved(&both, 0..13), [0, 6, 12]);
}

#[test]
fn a_time_interval_counts_from_the_start_of_the_last_save() {
    let policy = SavePolicy::every_seconds(10.0);
    let at =
        |seconds| policy.should_save(&Context { seconds_since_save: seconds, ..Context::default() }).unwrap();
    assert!(at(None) && at(Some(10.0)) && !at(Some(9.9)));
}

#[test]
fn preemption_saves_although_the_interval_says_no() {
    let policy = SavePolicy::every_steps(100) | SavePolicy::on_preemption();
    let context = Context { step: 7, latest: Some(0), preempted: true, ..Context::default() };
    assert!(policy.should_save(&context).unwrap());
    assert!(!policy.should_save(&Context { preempted: false, ..context }).unwrap());
}

#[test]
fn a_custom_policy_that_was_not_asked_says_no() {
    let policy = SavePolicy::Custom { name: "loss fell".into() } & SavePolicy::every_steps(1);
    assert!(!policy.should_save(&Context::default()).unwrap());
    let custom = BTreeMap::from([("loss fell".to_owned(), true)]);
    assert!(policy.should_save(&Context { custom, ..Context::default() }).unwrap());
}

#[test]
fn only_steps_are_decided_without_the_leader() {
    assert!((SavePolicy::every_steps(2) | SavePolicy::at_steps([7])).is_deterministic());
    assert!(!(SavePolicy::every_steps(2) | SavePolicy::on_preemption()).is_deterministic());
    assert!(!(SavePolicy::every_steps(2) & SavePolicy::WhenIdle).is_deterministic());
}

#[test]
fn what_can_never_work_is_refused() {
    assert!((SavePolicy::every_steps(0) | SavePolicy::every_steps(1)).check().is_err());
    for seconds in [-1.0, f64::NAN, f64::INFINITY] {
        assert!(SavePolicy::every_seconds(seconds).check().is_err());
    }
    let context = Context { latest: Some(1), ..Context::default() };
    assert!(!SavePolicy::every_steps(0).should_save(&context).unwrap());
}

#[test]
fn a_policy_survives_json() {
    let policy =
        (SavePolicy::every_steps(100) | SavePolicy::on_preemption()) & SavePolicy::every_seconds(0.5);
    let text = serde_json::to_string(&policy).unwrap();
    assert_eq!(serde_json::from_str::<SavePolicy>(&text).unwrap(), policy);
    assert_eq!(
        serde_json::from_str::<SavePolicy>(r#"{"policy": "every_steps", "n": 3}"#).unwrap(),
        SavePolicy::every_steps(3)
    );
    assert!(serde_json::from_str::<SavePolicy>(r#"{"policy": "every_steps", "m": 3}"#).is_err());
}
