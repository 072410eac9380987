use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;

fn steps(steps: impl IntoIterator<Item = u64>) -> Vec<Candidate<'static>> {
    let items = Names::Given(vec!["params", "optimizer", "."]);
    steps.into_iter().map(|step| Candidate { step, items: items.clone(), ..Candidate::default() }).collect()
}

fn scored(values: &[(u64, f64)]) -> Vec<Candidate<'static>> {
    values
        .iter()
        .map(|&(step, loss)| {
            let mut candidate = Candidate { step, ..Candidate::default() };
            with_loss(&mut candidate, loss);
            candidate
        })
        .collect()
}

fn with_loss(candidate: &mut Candidate<'_>, loss: f64) {
    static NAMES: LazyLock<[String; 1]> = LazyLock::new(|| ["loss".to_owned()]);
    candidate.metrics = Metrics { names: &*NAMES, values: Cow::Owned(vec![Some(loss)]) };
}

fn losses(steps: &[Candidate<'_>]) -> Vec<(u64, Option<f64>)> {
    steps.iter().map(|candidate| (candidate.step, candidate.metrics.get("loss"))).collect()
}

fn kept(retention: &Retention, steps: &[Candidate<'_>]) -> Vec<u64> {
    retention.plan(steps, 0).unwrap().kept().collect()
}

#[test]
fn the_newest_are_ranked_by_number() {
    assert_eq!(kept(&Retention::keep_latest(2), &steps([10, 20, 30, 5])), [20, 30]);
}

#[test]
fn keeping_none_keeps_the_newest() {
    assert_eq!(kept(&Retention::keep_latest(0), &steps(0..5)), [4]);
    assert_eq!(kept(&Retention::Any { of: vec![] }, &steps(0..5)), [4]);
}

#[test]
fn a_union_keeps_what_any_part_keeps() {
    let retention = Retention::keep_latest(2) | Retention::keep_every(4);
    assert_eq!(kept(&retention, &steps([0, 2, 4, 6, 8, 10])), [0, 4, 8, 10]);
}

#[test]
fn ties_keep_the_later() {
    let steps = scored(&[(1, 0.5), (2, 0.5), (3, 0.9)]);
    assert_eq!(kept(&Retention::keep_best(1, "loss", Mode::Min), &steps), [2, 3]);
}

#[test]
fn nan_is_worst_and_never_evicts_a_real_best() {
    for mode in [Mode::Min, Mode::Max] {
        let steps = scored(&[(1, 0.5), (2, f64::NAN), (3, f64::NAN), (4, 9.0)]);
        assert_eq!(kept(&Retention::keep_best(2, "loss", mode), &steps), [1, 4]);
        assert_eq!(kept(&Retention::keep_best(3, "loss", mode), &steps), [1, 3, 4]);
    }
    let steps = scored(&[(1, f64::NAN), (2, f64::INFINITY)]);
    assert_eq!(best(losses(&steps), Mode::Min).unwrap(), 2);
    assert!(best(losses(&scored(&[(1, f64::NAN), (2, f64::NAN)])), Mode::Max).is_none());
}

#[test]
fn a_step_without_the_metric_counts_last() {
    let mut some = scored(&[(1, 0.5), (2, 0.1)]);
    some.extend(steps([3, 4, 5]));
    assert_eq!(kept(&Retention::keep_best(1, "loss", Mode::Min), &some), [2, 5]);
    assert_eq!(kept(&Retention::keep_best(3, "loss", Mode::Min), &some), [1, 2, 5]);
    assert_eq!(best(losses(&some), Mode::Min).unwrap(), 2);
    assert!(best(losses(&steps([1])), Mode::Min).is_none());
}

#[test]
fn the_newest_is_never_evicted_by_a_metric() {
    let steps = scored(&[(1, 0.1), (2, 0.2), (3, 0.3)]);
    assert_eq!(kept(&Retention::keep_best(1, "loss", Mode::Min), &steps), [1, 3]);
}

#[test]
fn an_interval_is_counted_from_the_last_kept_step() {
    let hours = |hour: u64| i64::try_from(hour).unwrap() * 3600 * 1_000_000_000;
    let rule = Retention::KeepEverySeconds { seconds: 5.0 * 3600.0, items: None };
    let mut there: Vec<Candidate<'_>> = Vec::new();
    // One step an hour; after each the rule is applied.
    for step in 0..=19 {
        let mut all = steps([step]);
        all[0].committed_unix_ns = hours(step);
        there.append(&mut all);
        let kept = kept(&rule, &there);
        there.retain(|candidate| kept.contains(&candidate.step));
    }
    let left: Vec<u64> = there.iter().map(|candidate| candidate.step).collect();
    assert_eq!(left, [0, 5, 10, 15, 19]);
    assert!(Retention::KeepEverySeconds { seconds: 0.0, items: None }.check().is_err());
    assert!(Retention::KeepEverySeconds { seconds: f64::NAN, items: None }.check().is_err());
}

#[test]
fn thinning_keeps_the_named_items_of_old_steps() {
    let retention = Retention::keep_latest(1) | Retention::keep_every_items(10, ["params"]);
    let plan = retention.plan(&steps([0, 5, 10, 20]), 0).unwrap();
    assert_eq!(plan.deleted().collect::<Vec<_>>(), [5]);
    let thinned: Vec<_> = plan.thinned().map(|(step, items)| (step, items.clone())).collect();
    let params = BTreeSet::from(["params".to_owned()]);
    assert_eq!(thinned, [(0, params.clone()), (10, params)]);
}

#[test]
fn a_step_that_one_rule_keeps_whole_is_not_thinned_by_another() {
    let retention = Retention::keep_every_items(10, ["params"]) | Retention::keep_every(20);
    let plan = retention.plan(&steps([0, 10, 20, 30]), 0).unwrap();
    assert_eq!(plan.thinned().map(|(step, _)| step).collect::<Vec<_>>(), [10]);
}

#[test]
fn a_step_with_nothing_left_to_thin_is_left_alone() {
    let mut all = steps([0, 20]);
    all[0].items = Names::Given(vec!["params"]);
    let plan = Retention::keep_every_items(10, ["params"]).plan(&all, 0).unwrap();
    assert_eq!((plan.thinned().count(), plan.deleted().count()), (0, 0));
}

#[test]
fn a_thinning_rule_without_items_keeps_the_step_whole() {
    let retention = Retention::keep_latest(1) | Retention::keep_every_items(2, ["param"]);
    let plan = retention.plan(&steps(0..6), 0).unwrap();
    assert_eq!(plan.thinned().count(), 0);
    assert_eq!(plan.deleted().collect::<Vec<_>>(), [1, 3]);
    assert!(format!("{plan:?}").contains("none of its items (params, optimizer, .) matches"), "{plan:?}");
}

#[test]
fn age_counts_from_the_commit_despite_clock_changes() {
    let mut all = steps(0..4);
    for candidate in &mut all {
        candidate.committed_unix_ns = i64::try_from(candidate.step).unwrap() * 1_000_000_000;
    }
    let retention = Retention::KeepNewerThan { seconds: 2.0 };
    let at = |now| retention.plan(&all, now).unwrap().kept().collect::<Vec<_>>();
    assert_eq!(at(3_000_000_000), [2, 3]);
    assert_eq!(at(-1_000_000_000), [0, 1, 2, 3]);
}

#[test]
fn a_plan_explains_itself() {
    let retention = Retention::keep_latest(1) | Retention::keep_best(1, "loss", Mode::Min);
    let plan = retention.plan(&scored(&[(1, 0.1), (2, 0.2), (3, 0.3)]), 0).unwrap();
    let StepDecision::Keep { reasons, .. } = &plan.steps[&1] else { panic!("{plan:?}") };
    assert_eq!(reasons, &["keep_best(1, \"loss\", min): loss=0.1"]);
    assert_eq!(plan.steps[&2], StepDecision::Delete { reason: "no rule keeps it".to_owned() });
    let StepDecision::Keep { reasons, .. } = &plan.steps[&3] else { panic!("{plan:?}") };
    assert_eq!(reasons, &["the newest committed step always stays", "keep_latest(1)"]);
}

#[test]
fn a_held_step_stays() {
    let mut all = steps(0..3);
    all[0].held = true;
    assert_eq!(kept(&Retention::keep_latest(1), &all), [0, 2]);
}

#[test]
fn what_can_never_work_is_refused() {
    assert!(Retention::keep_every(0).check().is_err());
    assert!(Retention::keep_every_items(1, ["a[".to_owned()]).check().is_err());
    assert!(Retention::keep_every_items(1, Vec::<String>::new()).check().is_err());
    assert!(Retention::KeepNewerThan { seconds: f64::NAN }.check().is_err());
}

#[test]
fn a_policy_survives_json() {
    let retention = Retention::keep_latest(3)
        | Retention::keep_every_items(1000, ["params"])
        | Retention::keep_best(1, "loss", Mode::Min);
    let text = serde_json::to_string(&retention).unwrap();
    assert_eq!(serde_json::from_str::<Retention>(&text).unwrap(), retention);
}

/// Steps of 10 bytes of `params` and 20 of `optimizer`, each 10 after the one before it.
fn sized(count: u64) -> Vec<SizedStep> {
    let items = BTreeMap::from([("params".to_owned(), 10), ("optimizer".to_owned(), 20)]);
    let step = |n: u64| SizedStep {
        step: n * 10,
        committed_unix_ns: n.cast_signed() * 1_000_000_000,
        items: items.clone(),
        metrics: BTreeMap::new(),
    };
    (1..=count).map(step).collect()
}

#[test]
fn a_forecast_counts_the_saves_that_fit() {
    let every = RegularSaves { steps: 10, ns: 1_000_000_000 };
    let fit = |rule: &Retention, free| rule.saves_until_full(sized(2), every, free).unwrap();
    assert_eq!(fit(&Retention::KeepAll, 29), Some(0.0));
    assert_eq!(fit(&Retention::KeepAll, 30 * 1000), Some(1000.0));
    // One more than are kept, until the oldest is deleted.
    assert_eq!(fit(&Retention::keep_latest(3), 59), Some(1.0));
    assert_eq!(fit(&Retention::keep_latest(3), 60), None);
    assert_eq!(fit(&Retention::keep_latest(1), 30), None);
    // Steps 10 and 20 go, and 100, 200, 300, 400 and 500 leave 10 bytes each.
    let thinned = Retention::keep_latest(1) | Retention::keep_every_items(100, ["params"]);
    assert_eq!(fit(&thinned, 49), Some(49.0));
    assert_eq!(Retention::KeepAll.saves_until_full(Vec::new(), every, 0).unwrap(), None);
}

#[test]
fn a_far_end_of_the_disk_is_extrapolated() {
    let every = RegularSaves { steps: 10, ns: 1_000_000_000 };
    let fit = |rule: &Retention, free| rule.saves_until_full(sized(2), every, free).unwrap().unwrap();
    let saves = fit(&Retention::KeepAll, 30 * 1_000_000);
    assert!((saves - 1_000_000.0).abs() < 1e-3, "{saves}");
    let thinned = Retention::keep_latest(1) | Retention::keep_every_items(100, ["params"]);
    let saves = fit(&thinned, 10 * 1_000_000);
    assert!((saves / 10_000_000.0 - 1.0).abs() < 0.01, "{saves}");
}

proptest! {
    #[test]
    fn a_union_never_keeps_less_than_its_parts(
        numbers in proptest::collection::btree_set(0_u64..50, 1..20),
        n in 0_u64..5, every in 1_u64..7, losses in proptest::collection::vec(-1.0..1.0_f64, 20),
    ) {
        let mut all = steps(numbers.iter().copied());
        for (candidate, loss) in all.iter_mut().zip(losses) {
            with_loss(candidate, loss);
        }
        let parts = [
            Retention::keep_latest(n), Retention::keep_every(every), Retention::keep_best(n, "loss", Mode::Max),
        ];
        let whole = Retention::Any { of: parts.to_vec() };
        let union: BTreeSet<u64> = parts.iter().flat_map(|part| kept(part, &all)).collect();
        prop_assert_eq!(kept(&whole, &all), union.into_iter().collect::<Vec<_>>());
        prop_assert!(kept(&whole, &all).len() >= all.len().min(n.max(1) as usize));
        prop_assert!(kept(&whole, &all).contains(numbers.last().unwrap()));
    }

    #[test]
    fn what_is_done_is_what_the_plan_explains(
        numbers in proptest::collection::btree_set(0_u64..50, 1..20),
        n in 0_u64..5, every in 1_u64..7, losses in proptest::collection::vec(-1.0..1.0_f64, 20),
    ) {
        let mut all = steps(numbers);
        for (candidate, loss) in all.iter_mut().zip(losses).skip(3) {
            with_loss(candidate, loss);
        }
        let retention = Retention::keep_latest(n)
            | Retention::keep_every_items(every, ["params"])
            | Retention::keep_best(n, "loss", Mode::Max);
        let plan = retention.plan(&all, 0).unwrap();
        let changes = retention.changes(&all, 0).unwrap();
        prop_assert!(changes.deleted().eq(plan.deleted()));
        prop_assert!(changes.thinned().eq(plan.thinned()));
    }
}
