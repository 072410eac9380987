use super::*;

/// Parses a rendering: bracketed parts are indices, the rest keys.
fn path(rendered: &str) -> LeafPath {
    let mut components = Vec::new();
    for part in rendered.split('/').filter(|part| !part.is_empty()) {
        let mut parts = part.split(['[', ']']).filter(|part| !part.is_empty());
        if !part.starts_with('[') {
            components.push(Component::Key(parts.next().unwrap().into()));
        }
        components.extend(parts.map(|index| Component::Index(index.parse().unwrap())));
    }
    LeafPath(components)
}

fn want(rendered: &str, dtype: Dtype, shape: &[u64]) -> Wanted {
    let spec = Spec::Tensor { dtype: Some(dtype), shape: Some(shape.to_vec()) };
    Wanted { path: path(rendered), spec, holds_value: false }
}

fn want_as(rendered: &str, spec: Spec) -> Wanted {
    Wanted { path: path(rendered), spec, holds_value: false }
}

fn tensor(rendered: &str, dtype: Dtype, shape: &[u64]) -> StoredLeaf {
    StoredLeaf { path: path(rendered), spec: StoredSpec::Tensor { dtype, shape: shape.into() } }
}

fn object(rendered: &str) -> StoredLeaf {
    StoredLeaf { path: path(rendered), spec: StoredSpec::Object }
}

const F32: Dtype = Dtype::Float32;

fn pairs(report: &Report) -> Vec<(usize, usize)> {
    report.matches.iter().map(|found| (found.wanted, found.stored)).collect()
}

#[test]
fn leaves_meet_by_path_and_what_fits_is_read() {
    let wanted = [want("params/w", F32, &[4, 2]), want_as("step", Spec::Object)];
    let stored = [object("step"), tensor("params/w", F32, &[4, 2])];
    let report = match_state(&wanted, &stored, &MatchOptions::default());
    assert_eq!(pairs(&report), [(0, 1), (1, 0)]);
    let found = report.matches[0].tensor.as_ref().unwrap();
    assert_eq!(
        (found.region.clone(), found.is_cast(), found.padded, found.truncated),
        (Region::whole(&[4, 2]), false, false, false)
    );
    assert_eq!(report.to_string(), "2 leaves match");
    assert!(report.is_ok());
}

#[test]
fn one_report_names_everything_that_does_not_fit() {
    let wanted = [
        want("params/decoder/layers[0]/w", F32, &[4]),
        want("params/decoder/layers[1]/w", F32, &[4]),
        want("params/decoder/bias", F32, &[4]),
        want("params/embed", F32, &[8, 2]),
        want("params/head", Dtype::Bfloat16, &[2]),
        want("params/count", F32, &[]),
        want_as("params/name", Spec::Object),
    ];
    let stored = [
        tensor("params/decodr/layers[1]/w", F32, &[4]),
        tensor("params/decoder/layers[0]/w", F32, &[4]),
        tensor("params/decoder/b", F32, &[4]),
        tensor("params/embed", F32, &[4, 2]),
        tensor("params/head", F32, &[2]),
        object("params/count"),
        tensor("params/name", F32, &[1]),
        tensor("optimizer/mu", F32, &[1]),
    ];
    let report = match_state(&wanted, &stored, &MatchOptions::default());
    assert_eq!(pairs(&report), [(0, 1)]);
    assert_eq!(report.not_wanted, [7]);
    assert!(!report.is_ok());
    let expected = "\
the checkpoint does not hold what is wanted: 2 missing, 2 unexpected, 1 wrong shape, 1 wrong dtype, 2 wrong kind
missing: wanted, but not stored (2):
  params/decoder/layers[1]/w; near it is stored `params/decodr/layers[1]/w`
  params/decoder/bias; near it is stored `params/decoder/b`
  → rename the stored leaves, leave these out of what is wanted, or keep the values they have with missing=\"keep\" (also per glob)
unexpected: stored, but not wanted (2):
  params/decodr/layers[1]/w; near it is missing `params/decoder/layers[1]/w`
  params/decoder/b; near it is missing `params/decoder/bias`
  → add them to what is wanted, leave them out with exclude=…, or pass them over with unexpected=\"ignore\" (also per glob)
wrong shape (1):
  params/embed: stored (4, 2), wanted (8, 2)
  → want the stored shape, or allow the difference with resize=\"pad\", \"truncate\" or \"both\" (also per glob)
wrong dtype (1):
  params/head: stored float32, wanted bfloat16, which may lose values
  → want the stored dtype, or allow the loss with cast=\"lossy\" or cast={glob: dtype}
wrong kind (2):
  params/count: stored is an object, wanted is a tensor
  params/name: stored is a tensor, wanted is an object
  → want what is stored (an array or its description for a tensor, a plain value for an object)";
    assert_eq!(report.to_string(), expected);
}

#[test]
fn a_class_with_many_leaves_shows_some_and_counts_the_rest() {
    let wanted: Vec<Wanted> = (0..1250).map(|i| want(&format!("params/w{i}"), F32, &[1])).collect();
    let report = match_state(&wanted, &[], &MatchOptions::default());
    let text = report.to_string();
    assert!(!match_state(&wanted[..16], &[], &MatchOptions::default()).to_string().contains("more"));
    assert!(text.contains("\n  … and 1234 more\n"), "{text}");
    assert_eq!(text.lines().count(), 1 + 1 + 16 + 1 + 1);
    assert_eq!(report.missing.len(), 1250, "the report itself holds all");
}

#[test]
fn unwanted_top_entries_are_no_error() {
    let stored = [tensor("params/w", F32, &[1]), tensor("params/x", F32, &[1]), tensor("ema/w", F32, &[1])];
    let wanted = [want("params/w", F32, &[1])];
    let report = match_state(&wanted, &stored, &MatchOptions::default());
    assert_eq!((report.not_wanted.as_slice(), report.unexpected.len()), (&[2][..], 1));
    let unexpected = PerGlob::new([("params/x", OnUnexpected::Ignore)], OnUnexpected::Error).unwrap();
    let report = match_state(&wanted, &stored, &MatchOptions { unexpected, ..MatchOptions::default() });
    assert!(report.is_ok());
    assert_eq!(report.ignored, [1]);
    assert_eq!(report.to_string(), "1 leaves match, 1 ignored, 1 stored but not wanted");
    // An empty `ema` in the caller's state makes it wanted.
    let top_level = vec![Component::Key("ema".into())];
    let report = match_state(
        &wanted,
        &stored[..1].iter().chain(&stored[2..]).cloned().collect::<Vec<_>>(),
        &MatchOptions { top_level, ..MatchOptions::default() },
    );
    assert_eq!(report.unexpected[0].path, "ema/w");
}

#[test]
fn missing_leaves_keep_their_values_if_asked() {
    let mut wanted =
        [want("params/lora/a", F32, &[1]), want("params/lora/b", F32, &[1]), want("params/w", F32, &[1])];
    wanted[0].holds_value = true;
    wanted[2].holds_value = true;
    let missing = PerGlob::new([("**/lora/*", OnMissing::Keep)], OnMissing::Error).unwrap();
    let report = match_state(&wanted, &[], &MatchOptions { missing, ..MatchOptions::default() });
    assert_eq!(report.kept, [Kept { wanted: 0, why: Why::NotStored }]);
    let reasons: Vec<_> = report.missing.iter().map(|leaf| (leaf.path.as_str(), leaf.reason)).collect();
    assert_eq!(reasons, [("params/lora/b", Missing::NothingToKeep), ("params/w", Missing::NotStored)]);
    assert!(report.to_string().contains("params/lora/b (nothing to keep"));
}

#[test]
fn a_pattern_of_missing_applies_to_an_absent_branch() {
    let mut branch = want("train/groups", F32, &[1]);
    branch.spec = Spec::Any;
    branch.holds_value = true;
    let missing = PerGlob::new([("train/**", OnMissing::Keep)], OnMissing::Error).unwrap();
    let report = match_state(&[branch], &[], &MatchOptions { missing, ..MatchOptions::default() });
    assert_eq!(report.kept, [Kept { wanted: 0, why: Why::NotStored }]);
    assert!(report.unmatched.is_empty());
}

#[test]
fn deselected_leaves_keep_their_values() {
    let mut wanted = [want("params/w", F32, &[1]), want("params/x", F32, &[1])];
    wanted[0].holds_value = true;
    let stored = [tensor("params/w", F32, &[1]), tensor("params/x", F32, &[1])];
    let selection = Selection::new(Some(&["optimizer/**"]), &[]).unwrap();
    let stored = [stored.as_slice(), &[tensor("optimizer/m", F32, &[1])]].concat();
    let report = match_state(&wanted, &stored, &MatchOptions { selection, ..MatchOptions::default() });
    assert_eq!(report.deselected, [0, 1]);
    assert_eq!(report.kept, [Kept { wanted: 0, why: Why::Deselected }]);
    assert_eq!(report.missing[0].reason, Missing::Deselected);
    assert!(report.to_string().contains("params/x (stored, but left out by include/exclude)\n"));
}

#[test]
fn renames_follow_selection_and_report_collisions() {
    let stored = [tensor("model/a", F32, &[1]), tensor("old/a", F32, &[1]), tensor("old/b", F32, &[1])];
    let wanted = [want("params/a", F32, &[1]), want("params/b", F32, &[1])];
    let renames = || Renames::new([("model", "params"), ("old", "params")]).unwrap();
    let report =
        match_state(&wanted, &stored, &MatchOptions { renames: renames(), ..MatchOptions::default() });
    assert_eq!(report.collisions[0].stored_paths, ["model/a", "old/a"]);
    let text = report.to_string();
    assert!(text.contains("\n  params/a: model/a, old/a\n"), "{text}");
    let selection = Selection::new(None, &["old/a"]).unwrap();
    let report = match_state(
        &wanted,
        &stored,
        &MatchOptions { selection, renames: renames(), ..MatchOptions::default() },
    );
    assert!(report.is_ok());
    assert_eq!(pairs(&report), [(0, 0), (1, 2)]);
    let report =
        match_state(&wanted[1..], &stored, &MatchOptions { renames: renames(), ..MatchOptions::default() });
    assert_eq!(report.unexpected[1].renamed.as_deref(), Some("params/a"));
    assert!(report.to_string().contains("old/a (renamed to params/a)"));
}

#[test]
fn a_tie_is_read_from_where_it_is_stored() {
    let alias = StoredLeaf { path: path("params/head"), spec: StoredSpec::Alias { of: 0 } };
    let stored = [tensor("params/embed", F32, &[3]), alias];
    let report = match_state(
        &[want("params/embed", F32, &[3]), want("params/head", F32, &[3])],
        &stored,
        &MatchOptions::default(),
    );
    let sources: Vec<_> = report.matches.iter().map(|found| (found.stored, found.source)).collect();
    assert_eq!(sources, [(0, 0), (1, 0)]);
    let report = match_state(&[want("params/head", F32, &[4])], &stored[1..], &MatchOptions::default());
    assert_eq!(report.wrong_kind.len(), 1, "an alias of itself holds nothing: {report}");
}

#[test]
fn left_out_leaves_and_subtrees_are_not_read() {
    let stored = [
        tensor("params/a/w", F32, &[1]),
        tensor("params/a/x", Dtype::Int8, &[2]),
        tensor("params/b", F32, &[3]),
        object("step"),
    ];
    let wanted =
        [want_as("params/a", Spec::Skip), want_as("params/b", Spec::Any), want_as("gone", Spec::Skip)];
    let report = match_state(&wanted, &stored, &MatchOptions::default());
    assert!(report.is_ok());
    assert_eq!((pairs(&report), report.skipped.as_slice()), (vec![(1, 2)], &[0, 1][..]));
    let report = match_state(
        &[want_as("params/a", Spec::Any), want_as("gone", Spec::Any)],
        &stored[..2],
        &MatchOptions::default(),
    );
    assert_eq!(pairs(&report), [(0, 0), (0, 1)]);
    assert_eq!(report.matches[1].tensor.as_ref().unwrap().dtype, Dtype::Int8);
    assert_eq!(report.missing[0].path, "gone");
    // Everything, as stored, but for one leaf.
    let report = match_state(
        &[want_as("", Spec::Any), want_as("params/b", Spec::Skip)],
        &stored,
        &MatchOptions::default(),
    );
    assert_eq!((pairs(&report), report.skipped.as_slice()), (vec![(0, 0), (0, 1), (0, 3)], &[2][..]));
}

#[test]
fn casts_are_allowed_exactly_as_asked() {
    let stored = [tensor("w", F32, &[1])];
    let try_cast = |wanted: Option<Dtype>, cast: PerGlob<Cast>| {
        let wanted = want_as("w", Spec::Tensor { dtype: wanted, shape: None });
        let report = match_state(&[wanted], &stored, &MatchOptions { cast, ..MatchOptions::default() });
        report.matches.first().and_then(|found| found.tensor.as_ref()).map(|tensor| tensor.dtype)
    };
    let everywhere = PerGlob::everywhere;
    let to = |dtype| PerGlob::new([("w", Cast::To(dtype))], Cast::Lossless).unwrap();
    let (f64, bf16, i8) = (Dtype::Float64, Dtype::Bfloat16, Dtype::Int8);
    for (wanted, cast, expected) in [
        (None, everywhere(Cast::Exact), Some(F32)),
        (Some(f64), everywhere(Cast::Exact), None),
        (Some(f64), everywhere(Cast::Lossless), Some(f64)),
        (Some(bf16), everywhere(Cast::Lossless), None),
        (Some(bf16), everywhere(Cast::Lossy), Some(bf16)),
        (Some(Dtype::DatetimeS), everywhere(Cast::Lossy), None),
        (None, to(bf16), Some(bf16)),
        (Some(bf16), to(bf16), Some(bf16)),
        (Some(i8), to(bf16), None),
        (Some(f64), to(bf16), Some(f64)),
        (Some(bf16), PerGlob::new([("x", Cast::Lossy)], Cast::Lossless).unwrap(), None),
    ] {
        assert_eq!(try_cast(wanted, cast.clone()), expected, "{wanted:?} {cast:?}");
    }
}

#[test]
fn shapes_differ_only_as_far_as_resizing_is_allowed() {
    let stored = [tensor("w", F32, &[4, 6])];
    let try_resize = |shape: &[u64], resize| {
        let options = MatchOptions { resize: PerGlob::everywhere(resize), ..MatchOptions::default() };
        let report = match_state(&[want("w", F32, shape)], &stored, &options);
        let tensor = report.matches.first().and_then(|found| found.tensor.clone());
        tensor.map(|tensor| (tensor.region.extent.to_vec(), tensor.padded, tensor.truncated))
    };
    for (shape, resize, expected) in [
        (&[4, 6][..], Resize::Never, Some((vec![4, 6], false, false))),
        (&[5, 6], Resize::Never, None),
        (&[5, 6], Resize::Pad, Some((vec![4, 6], true, false))),
        (&[3, 6], Resize::Pad, None),
        (&[3, 6], Resize::Truncate, Some((vec![3, 6], false, true))),
        (&[5, 6], Resize::Truncate, None),
        (&[5, 3], Resize::Truncate, None),
        (&[5, 3], Resize::Both, Some((vec![4, 3], true, true))),
        (&[5, 6], Resize::Keep, None), // the wanted leaf holds no value
        (&[4, 6], Resize::Keep, Some((vec![4, 6], false, false))),
        (&[24], Resize::Both, None),
    ] {
        assert_eq!(try_resize(shape, resize), expected, "{shape:?} {resize:?}");
    }
    let report = match_state(&[want("w", F32, &[24])], &stored, &MatchOptions::default());
    assert!(
        report.to_string().contains("w: stored (4, 6), wanted (24,) (2 and 1 dimensions: no resize helps)")
    );
}

#[test]
fn near_names_are_found_for_many_kinds_of_changes() {
    for (missing, stored) in [
        ("params/decoder/w", "params/decodr/w"),
        ("params/model/layers[3]/w", "params/layers[3]/w"),
        ("params/layers[3]/w", "params/model/layers[3]/w"),
        ("params/a/b/w", "params/a.b.W"),
        ("params/kernel", "params/weight"),
        ("params/x/y/mlp/up", "params/z/mlp/up"),
        ("params/w", "params/w/data"),
        ("params/w", "model/w"),
    ] {
        let mut leaves: Vec<StoredLeaf> =
            (0..500).map(|i| tensor(&format!("params/other{i}/unlike{i}"), F32, &[1])).collect();
        leaves.push(tensor(stored, F32, &[1]));
        let report = match_state(&[want(missing, F32, &[1])], &leaves, &MatchOptions::default());
        assert_eq!(report.missing[0].near, [stored], "{missing}");
    }
}

#[test]
fn stored_leaves_are_those_of_the_index_in_leaf_order() {
    use stepwell_core::format::index::TensorRecord;
    use stepwell_core::tree::{ContainerKind, Tree};
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let list = tree.push_container(Some(root), Some(Component::Key("l".into())), ContainerKind::List);
    tree.push_leaf(Some(list), Some(Component::Index(0)));
    tree.push_leaf(Some(root), Some(Component::Key("tied".into())));
    let record = TensorRecord { dtype: F32, shape: vec![2].into(), chunks: Vec::new().into() };
    let leaves = vec![LeafRecord::Tensor(record), LeafRecord::Alias { of: 0 }];
    let stored = stored_leaves(&Index { tree, leaves, files: Vec::new() });
    let alias = StoredLeaf { path: path("tied"), spec: StoredSpec::Alias { of: 0 } };
    assert_eq!(stored, [tensor("l[0]", F32, &[2]), alias]);
}

#[test]
fn a_pattern_without_a_match_fails_with_near_names() {
    let stored = [
        tensor("params/layers[0]/weight", F32, &[1]),
        tensor("params/layers[0]/bias", F32, &[1]),
        tensor("optimizer/m", F32, &[1]),
    ];
    let wanted = [want_as("", Spec::Any)];
    let of = |report: Report| {
        let found = report
            .unmatched
            .iter()
            .map(|one| (one.option, one.fails, one.near.join(" ")))
            .collect::<Vec<_>>();
        (report.is_ok(), found)
    };
    let selected = |include: &str| {
        let selection = Selection::new(Some(&[include]), &[]).unwrap();
        match_state(&wanted, &stored, &MatchOptions { selection, ..MatchOptions::default() })
    };
    for (include, near) in [
        ("parms/**", "params"),
        ("params/layer/**", "params/layers"),
        ("params/layers[1]/**", "params/layers[0]"),
        ("params/layers[0]/weight/**", "params/layers[0]/weight"),
        ("params/layers[0]/**norm", "params/layers[0]/**"),
        ("optimizing/**", "optimizer"),
        ("**/wieght", "params/layers[0]/weight"),
        ("nowhere/to/be/found", ""),
    ] {
        assert_eq!(of(selected(include)), (false, vec![("include", true, near.to_owned())]), "{include}");
    }
    assert!(selected("params").is_ok(), "a glob that matches a subtree selects it");
    let text = selected("parms/**").to_string();
    assert!(text.contains("include: `parms/**`; near it is `params`"), "{text}");
    assert!(!text.contains("missing:"), "{text}");
    let selection = Selection::new(None, &["**"]).unwrap();
    let text =
        match_state(&wanted, &stored, &MatchOptions { selection, ..MatchOptions::default() }).to_string();
    assert!(text.contains("the whole state (stored, but left out by include/exclude)"), "{text}");

    let selection = Selection::new(None, &["optimiser/**"]).unwrap();
    let report = match_state(&wanted, &stored, &MatchOptions { selection, ..MatchOptions::default() });
    assert_eq!(of(report), (false, vec![("exclude", true, "optimizer".to_owned())]));
    let renames = Renames::new([("model", "params")]).unwrap();
    let report = match_state(&wanted, &stored, &MatchOptions { renames, ..MatchOptions::default() });
    assert_eq!(of(report), (false, vec![("rename", true, String::new())]));
    let cast = PerGlob::new([("params/*/weights", Cast::To(Dtype::Bfloat16))], Cast::Lossless).unwrap();
    let report = match_state(&wanted, &stored, &MatchOptions { cast, ..MatchOptions::default() });
    assert_eq!(of(report).1[0].0, "cast");
    let unexpected = PerGlob::new([("head/**", OnUnexpected::Ignore)], OnUnexpected::Error).unwrap();
    let report = match_state(&wanted, &stored, &MatchOptions { unexpected, ..MatchOptions::default() });
    assert_eq!(
        of(report),
        (true, vec![("unexpected", false, String::new())]),
        "it allows something, and need not be used"
    );
}

#[test]
fn a_rename_to_what_is_not_wanted_is_told() {
    let stored = [tensor("old/a", F32, &[1]), tensor("old/b", F32, &[1]), tensor("params/w", F32, &[1])];
    let renames = || Renames::new([("old", "model")]).unwrap();
    let report = match_state(
        &[want("params/w", F32, &[1])],
        &stored,
        &MatchOptions { renames: renames(), ..MatchOptions::default() },
    );
    assert!(report.is_ok());
    assert_eq!(report.idle_renames, [("old".to_owned(), "model".to_owned())]);
    assert!(report.to_string().contains("old → model"));
    let report = match_state(
        &[want("model/a", F32, &[1]), want("model/b", F32, &[1])],
        &stored,
        &MatchOptions { renames: renames(), ..MatchOptions::default() },
    );
    assert_eq!(report.idle_renames, []);
}

#[test]
fn what_was_in_a_dropped_item_is_said_to_have_been() {
    let stored = [tensor("params/w", F32, &[1])];
    let dropped = |item: &str| Dropped { item: item.to_owned(), when: "on Monday".to_owned() };
    let options = |item: &str| MatchOptions { dropped: vec![dropped(item)], ..MatchOptions::default() };
    let wanted = [want("optimizer/m", F32, &[1]), want("params/b", F32, &[1]), want_as("step", Spec::Object)];
    let reasons = |report: &Report| report.missing.iter().map(|leaf| leaf.reason).collect::<Vec<_>>();
    let report = match_state(&wanted, &stored, &options("optimizer"));
    assert_eq!(reasons(&report), [Missing::Dropped(0), Missing::NotStored, Missing::NotStored]);
    let text = report.to_string();
    assert!(
        text.contains("optimizer/m (the item `optimizer` was dropped from this step by thinning, on Monday;"),
        "{text}"
    );
    let report = match_state(&wanted, &stored, &options("."));
    assert_eq!(reasons(&report), [Missing::NotStored, Missing::NotStored, Missing::Dropped(0)]);
    assert!(report.to_string().contains("step (the loose leaves were dropped from this step"));
    let selection = Selection::new(None, &["optimizer/**"]).unwrap();
    let report = match_state(
        &[want("params/w", F32, &[1])],
        &stored,
        &MatchOptions { selection, ..options("optimizer") },
    );
    assert!(report.is_ok(), "what is gone need not be there to be left out: {report}");
}

#[test]
fn what_other_ranks_want_is_not_unexpected() {
    let stored = ["a", "b", "c"].map(|name| tensor(&format!("params/{name}"), F32, &[1]));
    let options = MatchOptions { elsewhere: [1].into(), ..MatchOptions::default() };
    let report = match_state(&[want("params/a", F32, &[1])], &stored, &options);
    assert_eq!(report.not_wanted, [1]);
    assert_eq!(report.unexpected.iter().map(|leaf| leaf.stored).collect::<Vec<_>>(), [2]);
}

#[test]
fn the_text_of_a_match_counts_what_changes_and_what_stays() {
    let stored = [
        tensor("p/cast", F32, &[1]),
        tensor("p/padded", F32, &[1]),
        tensor("p/truncated", F32, &[2]),
        tensor("p/ignored", F32, &[1]),
        tensor("p/skipped", F32, &[1]),
        tensor("p/deselected", F32, &[1]),
        tensor("q", F32, &[1]),
    ];
    let mut wanted = [
        want("p/cast", Dtype::Float64, &[1]),
        want("p/padded", F32, &[2]),
        want("p/truncated", F32, &[1]),
        want_as("p/skipped", Spec::Skip),
        want("p/kept", F32, &[1]),
    ];
    wanted[4].holds_value = true;
    let options = MatchOptions {
        selection: Selection::new(None, &["p/deselected"]).unwrap(),
        missing: PerGlob::everywhere(OnMissing::Keep),
        unexpected: PerGlob::everywhere(OnUnexpected::Ignore),
        resize: PerGlob::everywhere(Resize::Both),
        ..MatchOptions::default()
    };
    let text = match_state(&wanted, &stored, &options).to_string();
    assert_eq!(
        text,
        "3 leaves match, 1 cast, 2 resized, 1 kept as they are, 1 ignored, 3 stored but not wanted"
    );
}

#[test]
fn a_resized_leaf_keeps_values_only_where_it_is_longer() {
    let keeps = |shape: &[u64], resize| {
        let mut wanted = want("w", F32, shape);
        wanted.holds_value = true;
        let options = MatchOptions { resize: PerGlob::everywhere(resize), ..MatchOptions::default() };
        let report = match_state(&[wanted], &[tensor("w", F32, &[4])], &options);
        report.matches[0].tensor.as_ref().map(|tensor| tensor.keeps)
    };
    assert_eq!(keeps(&[5], Resize::Keep), Some(true));
    assert_eq!(keeps(&[4], Resize::Keep), Some(false));
    assert_eq!(keeps(&[5], Resize::Pad), Some(false));
}

#[test]
fn a_collision_names_three_leaves() {
    let text = |count: usize| {
        let stored: Vec<_> = (0..count).map(|i| tensor(&format!("old{i}/w"), F32, &[1])).collect();
        let renames = Renames::new([("old*", "new")]).unwrap();
        let options = MatchOptions { renames, ..MatchOptions::default() };
        match_state(&[want("new/w", F32, &[1])], &stored, &options).to_string()
    };
    assert!(text(3).contains("new/w: old0/w, old1/w, old2/w\n"), "{}", text(3));
    assert!(text(4).contains("new/w: old0/w, old1/w, old2/w, …\n"), "{}", text(4));
}

#[test]
fn a_leaf_is_deselected_only_if_it_or_something_below_is() {
    let stored = [tensor("params/ab/w", F32, &[1]), tensor("other/b/w", F32, &[1]), tensor("x/y", F32, &[1])];
    let reason = |wanted: Wanted, exclude: &str| {
        let selection = Selection::new(None, &[exclude]).unwrap();
        let report = match_state(&[wanted], &stored, &MatchOptions { selection, ..MatchOptions::default() });
        report.missing[0].reason
    };
    assert_eq!(reason(want_as("params/ab", Spec::Any), "params/ab/w"), Missing::Deselected);
    assert_eq!(reason(want_as("params/a", Spec::Any), "params/ab/w"), Missing::NotStored);
    assert_eq!(reason(want_as("param/a", Spec::Any), "other/b/w"), Missing::NotStored);
    assert_eq!(reason(want("x", F32, &[1]), "x/y"), Missing::NotStored);
    let text = match_state(&[want_as("", Spec::Any)], &[], &MatchOptions::default()).to_string();
    assert!(text.contains("missing: wanted, but not stored (1):\n  the whole state\n"), "{text}");
    let selection = Selection::new(None, &["**", "prams"]).unwrap();
    let report = match_state(
        &[want_as("", Spec::Any)],
        &stored,
        &MatchOptions { selection, ..MatchOptions::default() },
    );
    assert_eq!(report.missing[0].reason, Missing::Deselected, "only a wrong include explains it");
}

#[test]
fn idle_patterns_of_every_option_are_reported() {
    let mut wanted = [want("params/w", F32, &[1]), want("params/b", F32, &[1]), want_as("gone", Spec::Any)];
    wanted[1].holds_value = true;
    wanted[2].holds_value = true;
    let stored = [tensor("params/w", F32, &[1])];
    let found = |options: MatchOptions| {
        let report = match_state(&wanted, &stored, &options);
        report.unmatched.iter().map(|one| (one.option, one.fails)).collect::<Vec<_>>()
    };
    let missing = |glob: &str| {
        PerGlob::new([(glob, OnMissing::Error), ("**", OnMissing::Keep)], OnMissing::Keep).unwrap()
    };
    let cast = |glob: &str| PerGlob::new([(glob, Cast::Lossy)], Cast::Lossless).unwrap();
    let resize = |glob: &str| PerGlob::new([(glob, Resize::Both)], Resize::Never).unwrap();
    let options = |glob| MatchOptions {
        missing: missing(glob),
        cast: cast(glob),
        resize: resize(glob),
        ..Default::default()
    };
    assert_eq!(found(options("nowhere")), [("missing", false), ("cast", true), ("resize", false)]);
    // A wanted leaf that is not stored counts; a wanted subtree without leaves does not.
    assert_eq!(found(options("params/b")), []);
    assert_eq!(found(options("gone")), [("cast", true), ("resize", false)]);
    let dropped = vec![Dropped { item: "nowhere".into(), when: "on Monday".into() }];
    let report = found(MatchOptions { dropped, ..options("nowhere/w") });
    assert_eq!(report, [("missing", false), ("cast", false), ("resize", false)]);
}

#[test]
fn a_rename_that_an_earlier_one_leaves_nothing_is_no_mistake() {
    let stored = [tensor("old/w", F32, &[1])];
    let renames = Renames::new([("old", "params"), ("old/w", "never")]).unwrap();
    let options = MatchOptions { renames, ..MatchOptions::default() };
    let report = match_state(&[want("params/w", F32, &[1])], &stored, &options);
    assert!(report.is_ok() && report.unmatched.is_empty(), "{report}");
    assert_eq!(report.idle_renames, []);
}

#[test]
fn a_leaf_at_the_top_is_near_only_what_shares_something() {
    let near = |stored: &str| {
        let report =
            match_state(&[want("w", F32, &[1])], &[tensor(stored, F32, &[1])], &MatchOptions::default());
        report.missing[0].near.clone()
    };
    assert_eq!(near("x"), [""; 0]);
    assert_eq!(near("a/w"), ["a/w"]);
    assert_eq!(near("W_"), ["W_"]);
}

#[test]
fn subtrees_with_a_common_beginning_are_told_apart() {
    let stored = [tensor("params/w", F32, &[1]), tensor("params/wx", F32, &[1])];
    let selection = Selection::new(Some(&["params/w/**"]), &[]).unwrap();
    let options = MatchOptions { selection, ..MatchOptions::default() };
    let report = match_state(&[want_as("", Spec::Any)], &stored, &options);
    assert_eq!(report.unmatched[0].near, ["params/w"]);
}
