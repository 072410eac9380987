use globset::GlobBuilder;
use proptest::prelude::*;

use super::*;

/// Parses a rendering: bracketed parts are indices, the rest keys.
fn path(rendered: &str) -> PathText {
    let mut components = Vec::new();
    for part in rendered.split('/').filter(|part| !part.is_empty()) {
        let mut parts = part.split(['[', ']']).filter(|part| !part.is_empty());
        if !part.starts_with('[') {
            components.push(Component::Key(parts.next().unwrap().into()));
        }
        components.extend(parts.map(|index| Component::Int(index.parse().unwrap())));
    }
    PathText::new(&LeafPath(components))
}

fn matches(glob: &str, rendered: &str) -> bool {
    Glob::new(glob).unwrap().is_match(&path(rendered))
}

#[test]
fn a_star_stays_in_its_level_and_two_stars_do_not() {
    for (glob, yes, no) in [
        ("*", &["a", "a[0]"][..], &["a/b", "[0]"][..]),
        ("params/*", &["params/w"], &["params", "params/a/w", "params[0]"]),
        ("params/*/w", &["params/a/w", "params/a[1]/w"], &["params/w", "params/a/b/w"]),
        ("**", &["", "a", "a/b", "a[0]/b"], &[]),
        ("a/**/a", &["a/a", "a/b/a"], &["a"]),
        ("**/w", &["w", "a/w", "a[0]/b/w"], &["w/a", "aw", "a/xw"]),
        ("a/**", &["a/b", "a/b/c", "a[0]", "a[0]/w"], &["a", "ab", "b/a/c"]),
        ("a/**/w", &["a/w", "a/b/w", "a[0]/w", "a/b[1]/c/w"], &["a", "aw", "a/xw"]),
        (
            "**.weight",
            &["x.weight", "params/x.weight", "params/a[0]/x.weight"],
            &["params/weight", "x.weight/y"],
        ),
        ("**norm*", &["norm", "a/norm1", "a/b/layernorm"], &["a/norm/w", "a/n"]),
        ("a/x**z", &["a/xz", "a/x/y/z", "a/x[0]/z"], &["a/y/z"]),
        ("?b", &["ab", "éb", "€b", "𝄞b"], &["b", "aab"]),
        ("{a,b/c}/w", &["a/w", "b/c/w"], &["b/w", "c/w"]),
        ("x{,_{a,b}}", &["x", "x_a", "x_b"], &["x_", "x_c"]),
    ] {
        for p in yes {
            assert!(matches(glob, p), "`{glob}` matches `{p}`");
        }
        for p in no {
            assert!(!matches(glob, p), "`{glob}` does not match `{p}`");
        }
    }
}

#[test]
fn brackets_are_indices_that_match_literally_and_with_wildcards() {
    for (glob, yes, no) in [
        ("layers[0]/w", &["layers[0]/w"][..], &["layers[1]/w", "layers[00]/x", "layers0/w"][..]),
        ("layers[*]/w", &["layers[0]/w", "layers[12]/w"], &["layers/w", "layers[0][1]/w", "layers[0]/x/w"]),
        ("layers*/w", &["layers/w", "layers[0]/w", "layers[0][1]/w", "layers_b[2]/w"], &["layers/0/w"]),
        (
            "layers[1?]/w",
            &["layers[10]/w", "layers[19]/w"],
            &["layers[1]/w", "layers[100]/w", "layers[20]/w"],
        ),
        ("layers[{0,2}]/w", &["layers[0]/w", "layers[2]/w"], &["layers[1]/w"]),
        ("layers/[0]/w", &["layers[0]/w"], &["layers/w"]),
        ("[*]/w", &["[0]/w", "[-3]/w"], &["a[0]/w", "w"]),
        ("**/[0]", &["[0]", "a[0]", "a/b[0]"], &["a[1]", "a[0]/b"]),
        ("m[0][*]", &["m[0][7]"], &["m[0]", "m[1][0]"]),
        ("m[0]*", &["m[0]", "m[0][7]"], &["m[0]/w", "m[1]"]),
    ] {
        for p in yes {
            assert!(matches(glob, p), "`{glob}` matches `{p}`");
        }
        for p in no {
            assert!(!matches(glob, p), "`{glob}` does not match `{p}`");
        }
    }
}

#[test]
fn a_key_that_holds_a_slash_is_one_level() {
    let slashed = PathText::new(&LeafPath(vec![Component::Key("a".into()), Component::Key("x/[0]".into())]));
    assert!(Glob::new("a/*").unwrap().is_match(&slashed));
    assert!(!Glob::new("a/*/*").unwrap().is_match(&slashed));
    assert!(Glob::new(r"a/x\/\[0\]").unwrap().is_match(&slashed));
    assert!(!Glob::new("a/x[0]").unwrap().is_match(&slashed));
}

#[test]
fn what_cannot_be_meant_is_refused_with_the_way_to_write_it() {
    for (glob, says) in [
        ("a//b", "empty level"),
        ("a/", "empty level"),
        ("/a", "no leading `/`"),
        ("a[", "without `]`"),
        ("a]", "`\\]`"),
        ("a[]", "`[*]`"),
        ("a[xy]", "no character class"),
        ("a[0]b", "after `]`"),
        ("{a,b", "without `}`"),
        ("a}", "without `{`"),
        (r"a\q", r"`\q` means nothing"),
        (r"a\", "lone"),
    ] {
        let error = Glob::new(glob).unwrap_err();
        assert_eq!(error.kind(), "invalid");
        assert!(error.to_string().contains(says), "`{glob}`: {error}");
        assert!(error.to_string().contains(glob), "{error}");
    }
    let many = "{a,b}".repeat(11);
    assert!(Glob::new(&many).unwrap_err().to_string().contains("1024"));
}

#[test]
fn many_wildcards_on_a_path_that_almost_matches_end_quickly() {
    let glob = Glob::new(&"**a*".repeat(20)).unwrap();
    let text = path(&"a".repeat(200));
    assert!(glob.is_match(&text));
    let glob = Glob::new(&format!("{}b", "**a*".repeat(20))).unwrap();
    assert!(!glob.is_match(&path(&format!("{}bc", "a".repeat(200)))));
}

#[test]
fn the_first_matching_glob_wins() {
    let list = GlobList::new(["a/b", "a/*", "a/c", "**"]).unwrap();
    assert_eq!(list.first_match(path("a/b").as_bytes()), Some(0));
    assert_eq!(list.first_match(path("a/c").as_bytes()), Some(1));
    assert_eq!(list.first_match(path("x/y").as_bytes()), Some(3));
}

#[test]
fn a_list_is_asked_with_renderings_too() {
    let list = GlobList::new(["a/*", "b"]).unwrap();
    assert_eq!(list.first_match_rendered("b[0]").unwrap(), Some(1));
    assert_eq!(list.first_match_rendered("c").unwrap(), None);
    assert!(list.selects("a/w").unwrap() && !list.selects("a").unwrap());
}

fn component() -> impl Strategy<Value = Component> {
    prop_oneof![
        r"[ab*?{},!/\\\[\]é.-]{0,4}".prop_map(|key| Component::Key(key.into())),
        any::<i64>().prop_map(Component::Int),
        (0_u32..3).prop_map(Component::Index),
        "[ab]{1,2}".prop_map(|name| Component::Field(name.into())),
    ]
}

proptest! {
    #[test]
    fn an_escaped_path_matches_itself_only(
        a in prop::collection::vec(component(), 0..4),
        b in prop::collection::vec(component(), 0..4),
    ) {
        let (a, b) = (LeafPath(a), LeafPath(b));
        let glob = Glob::new(&escape(&a.to_string())).unwrap();
        prop_assert!(glob.is_match(&PathText::new(&a)));
        prop_assert!(glob.literal().is_some());
        prop_assert_eq!(glob.is_match(&PathText::new(&b)), a.to_string() == b.to_string());
        prop_assert_eq!(render(PathText::new(&a).as_bytes()), a.to_string());
    }

    #[test]
    fn without_brackets_and_escapes_globs_mean_what_globset_means(
        levels in prop::collection::vec(prop_oneof![Just("**".to_owned()), r"(a|b|\*a?|\?|a\*|\{a,b\}|\*){1,2}"], 1..5),
        names in prop::collection::vec("[ab]{1,3}", 1..6),
    ) {
        // Two stars that came to stand together inside a level mean more here than there, on
        // purpose.
        prop_assume!(levels.iter().all(|level| level == "**" || !level.contains("**")));
        let glob = levels.join("/");
        let theirs = GlobBuilder::new(&glob).literal_separator(true).build().unwrap().compile_matcher();
        prop_assert_eq!(matches(&glob, &names.join("/")), theirs.is_match(names.join("/")), "`{}`", glob);
    }
}
