//! Globs, renames and selections over leaf paths.

use arbitrary::{Arbitrary, Unstructured};
use stepwell_core::leaf_path::{Component, LeafPath};
use stepwell_reshard::glob::{Glob, GlobList, PathText, escape, render};
use stepwell_reshard::selection::{Renames, Selection};

#[derive(Arbitrary, Debug)]
enum Step<'a> {
    Key(&'a str),
    Int(i64),
    Index(u32),
    Field(&'a str),
}

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    globs: Vec<&'a str>,
    exclude: Option<&'a str>,
    rename: Option<(&'a str, &'a str)>,
    paths: Vec<Vec<Step<'a>>>,
}

/// Patterns of users are lines, not books; what a longer one costs is the user's own.
const MAX_INPUT: usize = 2048;

/// See the module documentation.
pub fn run(input: &[u8]) {
    if input.len() > MAX_INPUT {
        return;
    }
    let Ok(input) = Input::arbitrary(&mut Unstructured::new(input)) else { return };
    let paths: Vec<LeafPath> = input.paths.iter().map(|steps| path(steps)).collect();
    let texts: Vec<PathText> = paths.iter().map(PathText::new).collect();
    let globs: Vec<Glob> = input.globs.iter().filter_map(|glob| Glob::new(glob).ok()).collect();
    let list = GlobList::new(globs.iter().map(Glob::as_str)).expect("each was parsed alone");
    let exclude: Vec<&str> = input.exclude.into_iter().collect();
    let selection = Selection::new(Some(&input.globs), &exclude);
    let renames = input.rename.map(|rule| Renames::new([rule])).transpose();
    for (path, text) in paths.iter().zip(&texts) {
        let matched = globs.iter().any(|glob| glob.selects(text.as_bytes()));
        assert_eq!(list.globs().len(), globs.len());
        if let Ok(selection) = &selection
            && selection.selects_text(text.as_bytes())
        {
            assert!(matched, "a glob selects each selected path or a subtree above it");
        }
        if let Ok(Some(renames)) = &renames {
            let _ = renames.apply_rendered(&path.to_string());
        }
        if path.0.is_empty() {
            continue;
        }
        let rendered = path.to_string();
        assert_eq!(render(text.as_bytes()), rendered);
        let own = Glob::new(&escape(&rendered)).expect("an escaped path is a glob");
        for (other, other_text) in paths.iter().zip(&texts) {
            assert_eq!(own.is_match(other_text), text == other_text, "`{rendered}` and `{other}`");
        }
    }
}

fn path(steps: &[Step<'_>]) -> LeafPath {
    let component = |step: &Step<'_>| match *step {
        Step::Key(name) => Component::Key(name.into()),
        Step::Int(number) => Component::Int(number),
        Step::Index(number) => Component::Index(number),
        Step::Field(name) => Component::Field(name.into()),
    };
    LeafPath(steps.iter().map(component).collect())
}
