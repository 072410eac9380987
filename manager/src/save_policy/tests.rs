use super::*;

/// The steps that a policy saves, if `save` is called for each of them in turn.
fn saved(policy: &SavePolicy, steps: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let mut context = Context::default();
    steps
        .into_iter()
        .filter(|&step| {
            context.step = step;
            let yes = policy.should_save(&context);
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
    let at = |seconds| policy.should_save(&Context { seconds_since_save: seconds, ..Context::default() });
    assert!(at(None) && at(Some(10.0)) && !at(Some(9.9)));
}

#[test]
fn preemption_saves_although_the_interval_says_no() {
    let policy = SavePolicy::every_steps(100) | SavePolicy::on_preemption();
    let context = Context { step: 7, latest: Some(0), preempted: true, ..Context::default() };
    assert!(policy.should_save(&context));
    assert!(!policy.should_save(&Context { preempted: false, ..context }));
}

#[test]
fn a_custom_policy_that_was_not_asked_says_no() {
    let policy = SavePolicy::Custom { name: "loss fell".into() } & SavePolicy::every_steps(1);
    assert!(!policy.should_save(&Context::default()));
    let custom = BTreeMap::from([("loss fell".to_owned(), true)]);
    assert!(policy.should_save(&Context { custom, ..Context::default() }));
    assert_eq!(policy.custom_names(), BTreeSet::from(["loss fell"]));
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
    assert!(!SavePolicy::every_steps(0).should_save(&Context { latest: Some(1), ..Context::default() }));
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
