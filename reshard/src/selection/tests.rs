use stepwell_core::leaf_path::{Component, LeafPath};

use super::*;
use crate::glob::PathText;

fn renamed(rules: &[(&str, &str)], path: &str) -> Option<String> {
    let glob = Glob::new(&escape(path)).unwrap();
    let renames = Renames::new(rules.iter().copied()).unwrap();
    renames.apply_text(glob.literal().unwrap()).map(|(_, text)| render(&text))
}

#[test]
fn a_leaf_is_selected_by_include_and_exclude() {
    let selects = |selection: &Selection, keys: &[&str]| {
        let path = LeafPath(keys.iter().map(|&key| Component::Key(key.into())).collect());
        selection.selects_text(PathText::new(&path).as_bytes())
    };
    let selection = Selection::new(Some(&["params/**", "step"]), &["**/bias"]).unwrap();
    assert!(selects(&selection, &["params", "w"]) && selects(&selection, &["step"]));
    assert!(!selects(&selection, &["params", "bias"]) && !selects(&selection, &["optimizer", "mu"]));
    assert!(selects(&Selection::new::<&str>(None, &[]).unwrap(), &["x"]));
    let none = Selection::new::<&str>(Some(&[]), &[]).unwrap();
    assert!(!selects(&none, &["x"]), "an empty include selects nothing");
}

#[test]
fn a_rename_moves_a_leaf_or_a_branch_or_what_a_glob_matched() {
    for (rule, from, to) in [
        (("a/b", "c"), "a/b", Some("c")),
        (("a", "c"), "a/b[0]/w", Some("c/b[0]/w")),
        (("a", "c"), "ab", None),
        (
            ("optim/layer_*/**", "optimizer/layers[*]/**"),
            "optim/layer_3/mlp/mu",
            Some("optimizer/layers[3]/mlp/mu"),
        ),
        (("", "params"), "w", Some("params/w")),
        (("model", ""), "model/w", Some("w")),
        (("layer_*", "layers[*]"), "layer_3/w", Some("layers[3]/w")),
        (("layers[*]/**", "layer_*/**"), "layers[3]/a/b", Some("layer_3/a/b")),
        (("*/*/w", "{2}/{1}/w"), "a/b/w", Some("b/a/w")),
        (("**/w", "**/weight"), "w", Some("weight")),
        (("**/w", "**/weight"), "a[0]/w", Some("a[0]/weight")),
        (("**.gamma", "**.weight"), "params/norm.gamma", Some("params/norm.weight")),
        (("model/**", "{1}"), "model/a/b", Some("a/b")),
        (("a/x**", "b/**"), "a/xy/z", Some("b/y/z")),
        ((r"a\*", r"a\{1\}"), "a*/w", Some(r"a{1}/w")),
    ] {
        assert_eq!(renamed(&[rule], from).as_deref(), to, "{rule:?} on {from}");
    }
}

#[test]
fn the_first_rule_that_applies_renames_once() {
    let rules = [("a/b", "x"), ("a/*", "y/*"), ("a/c", "z"), ("y", "never")];
    assert_eq!(renamed(&rules, "a/b/w").as_deref(), Some("x/w"));
    assert_eq!(renamed(&rules, "a/c").as_deref(), Some("y/c"));
}

#[test]
fn a_rename_applies_to_a_rendering() {
    let renames = Renames::new([("a", "b")]).unwrap();
    assert_eq!(renames.apply_rendered("a[0]").unwrap().as_deref(), Some("b[0]"));
    assert_eq!(renames.apply_rendered("c").unwrap(), None);
}

#[test]
fn a_rename_that_cannot_be_meant_says_why() {
    for (from, to, says) in [
        ("{a,b}/w", "w", "braces"),
        ("a/*", "b/*/*", "asks for wildcard 2, but its left side has 1"),
        ("a/*", "b/{2}", "asks for wildcard 2"),
        ("a/*", "b/{x}", "`{1}` stands for the first wildcard"),
        ("a/**", "b_**", "whole level"),
        ("**/x/**", "**/**", "whole level"),
        ("*/*", "{1}{2}", "follow each other directly"),
        ("a[", "b", "without `]`"),
    ] {
        let error = Renames::new([(from, to)]).unwrap_err().to_string();
        assert!(error.contains(says), "{from} → {to}: {error}");
    }
}
