//! The rules of the house that no compiler checks: where unsafe code may stand, who may import whom, and which words have no place here.
#![expect(clippy::unwrap_used, reason = "a test that cannot read the tree has failed")]

use std::fs;
use std::path::{Path, PathBuf};

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn files_below(dir: &Path, endings: &[&str], found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with('.') || name == "target" || name == "__pycache__" {
            continue;
        }
        if path.is_dir() {
            files_below(&path, endings, found);
        } else if endings.iter().any(|ending| name.ends_with(ending)) {
            found.push(path);
        }
    }
}

fn sources(folder: &str, endings: &[&str]) -> Vec<(String, String)> {
    let root = project();
    let mut found = Vec::new();
    files_below(&root.join(folder), endings, &mut found);
    assert!(!found.is_empty(), "no {endings:?} below {folder}");
    found
        .into_iter()
        .map(|path| {
            let name = path.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
            (name, fs::read_to_string(&path).unwrap())
        })
        .collect()
}

#[test]
fn unsafe_code_stands_only_in_core_sys_and_in_the_ingest_of_arrays() {
    for folder in ["core", "reshard", "manager", "python", "tests"] {
        for (name, text) in sources(folder, &[".rs"]) {
            // Examples measure raw memory against the engine; they are no part of it.
            let may = ["core/src/sys/", "core/examples/", "python/src/ingest", "tests/tests/house_rules.rs"];
            if may.iter().any(|place| name.starts_with(place)) {
                continue;
            }
            for (number, line) in text.lines().enumerate() {
                let code = line.split("//").next().unwrap_or_default();
                let uses =
                    code.contains("unsafe {") || code.contains("unsafe fn") || code.contains("unsafe impl");
                assert!(!uses, "{name}:{}: unsafe code outside its two places", number + 1);
            }
        }
    }
    for name in ["reshard/src/lib.rs", "manager/src/lib.rs"] {
        assert!(
            fs::read_to_string(project().join(name)).unwrap().contains("#![forbid(unsafe_code)]"),
            "{name}"
        );
    }
}

#[test]
fn crates_depend_one_way_core_reshard_manager_python() {
    let allowed: [(&str, &[&str]); 4] = [
        ("core", &[]),
        ("reshard", &["core"]),
        ("manager", &["core", "reshard"]),
        ("python", &["core", "reshard", "manager"]),
    ];
    for (name, may) in allowed {
        let manifest = fs::read_to_string(project().join(name).join("Cargo.toml")).unwrap();
        for other in ["core", "reshard", "manager", "python", "tests"] {
            let uses = manifest.lines().any(|line| line.starts_with(&format!("stepwell-{other}")));
            assert!(!uses || may.contains(&other), "{name} depends on {other}");
        }
    }
}

#[test]
fn the_format_does_no_input_or_output_and_planning_has_no_threads() {
    for (name, text) in
        sources("core/src/format", &[".rs"]).into_iter().chain(sources("reshard/src", &[".rs"]))
    {
        for word in ["std::fs", "std::thread", "std::net", "rustix", "libc"] {
            let found = text.lines().any(|line| !line.trim_start().starts_with("//") && line.contains(word));
            assert!(!found, "{name} uses {word}");
        }
    }
}

#[test]
fn only_the_commit_renames() {
    for (name, text) in sources("manager/src", &[".rs"]) {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let renames = code.lines().any(|line| {
            // A decorator of `Dir` hands the call on.
            !line.trim_start().starts_with("//")
                && line.contains(".rename(")
                && !line.contains("self.inner.rename(")
        });
        assert!(!renames || name.starts_with("manager/src/commit"), "{name} renames");
    }
}

#[test]
fn nothing_is_ever_pickled() {
    for (name, text) in sources("python/stepwell", &[".py", ".pyi"]) {
        for word in [
            "import pickle",
            "import marshal",
            "import shelve",
            "import dill",
            "cloudpickle",
            "eval(",
            "exec(",
        ] {
            assert!(!text.contains(word), "{name} has `{word}`");
        }
    }
}
