//! The rules of the house that no compiler checks: where unsafe code may stand, who may import
//! whom, and which words have no place here.
#![expect(clippy::unwrap_used, reason = "a test that cannot read the tree has failed")]

use std::collections::HashMap;
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
fn unsafe_code_is_in_core_sys_and_the_ingest_only() {
    for folder in ["core", "reshard", "manager", "python", "tests"] {
        for (name, text) in sources(folder, &[".rs"]) {
            // Examples measure raw memory against the engine; they are no part of it.
            let may = [
                "core/src/sys/",
                "core/examples/",
                "python/src/ingest",
                // Calls the fake driver, which is C.
                "tests/src/fake_cuda.rs",
                "tests/tests/house_rules.rs",
            ];
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
            // The tests of a crate may need features of it.
            let may = name == other || may.contains(&other);
            assert!(!uses || may, "{name} depends on {other}");
        }
    }
}

#[test]
fn sys_imports_nothing_above_it() {
    // The vocabulary: errors, timeouts, and descriptions of regions and copies.
    let may =
        ["sys::", "sys)", "deadline::", "region::", "read_plan::", "{Error, Result}", "Error", "Result"];
    let mut imports = 0;
    for (place, code) in product_code("core/src/sys") {
        for path in code.split("crate::").skip(1) {
            imports += 1;
            assert!(may.iter().any(|start| path.starts_with(start)), "{place}: `{}`", code.trim());
        }
    }
    assert!(imports > 10, "{imports} imports");
}

#[test]
fn the_format_does_no_io_and_planning_has_no_threads() {
    for (name, text) in
        sources("core/src/format", &[".rs"]).into_iter().chain(sources("reshard/src", &[".rs"]))
    {
        for word in ["std::fs", "std::thread", "std::net", "rustix", "libc", "core::sys", "crate::sys"] {
            let found = text.lines().any(|line| !line.trim_start().starts_with("//") && line.contains(word));
            assert!(!found, "{name} uses {word}");
        }
    }
}

/// The product code of a crate: `place:line` and the line's code, without comments and tests (their
/// files, and the modules at the ends of others).
fn product_code(folder: &str) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    for (name, text) in sources(folder, &[".rs"]) {
        let is_test =
            ["/tests/", "/tests.rs", "_tests.rs", "/testing.rs"].iter().any(|part| name.contains(part));
        let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
        if is_test {
            continue;
        }
        for (number, line) in text[..end].lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            lines.push((format!("{name}:{}", number + 1), code.to_owned()));
        }
    }
    assert!(lines.len() > 500, "{folder} has {} lines", lines.len());
    lines
}

/// The lines of the Python package.
fn python_code() -> Vec<(String, String)> {
    let mut lines = Vec::new();
    for (name, text) in sources("python/stepwell", &[".py"]) {
        for (number, line) in text.lines().enumerate() {
            let code = line.split('#').next().unwrap_or_default();
            lines.push((format!("{name}:{}", number + 1), code.to_owned()));
        }
    }
    lines
}

/// A name that stands for two types in one crate says little about either.
#[test]
fn type_names_are_unique_in_their_crate() {
    for folder in ["core/src", "reshard/src", "manager/src", "python/src"] {
        let mut known: HashMap<String, String> = HashMap::new();
        for (place, code) in product_code(folder) {
            if place.starts_with("core/src/io/simulated/") {
                continue;
            }
            let Some(name) = defined_type(&code) else { continue };
            let before = known.insert(name.to_owned(), place.clone());
            assert!(before.is_none(), "`{name}` is a type in {} and in {place}", before.unwrap_or_default());
        }
        assert!(known.len() > 10, "{folder} has {} types", known.len());
    }
}

/// The struct, enum, union or trait that a line defines.
fn defined_type(code: &str) -> Option<&str> {
    let mut words = code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
    let kind = words.find(|word| !matches!(*word, "pub" | "crate" | "super" | "self" | "in" | "unsafe"))?;
    if matches!(kind, "struct" | "enum" | "union" | "trait") { words.next() } else { None }
}

/// So all of them are deaf to signals: what one interrupts may not be repeated safely.
#[test]
fn threads_are_started_in_core_sys_only() {
    for folder in ["core/src", "manager/src", "python/src"] {
        for (place, code) in product_code(folder) {
            let may = place.starts_with("core/src/sys/");
            let starts =
                ["thread::Builder", "thread::spawn", "thread::scope"].iter().any(|way| code.contains(way));
            assert!(may || !starts, "{place}: use sys::spawn or sys::each");
        }
    }
}

#[test]
fn only_the_commit_renames() {
    for folder in ["core/src", "reshard/src", "manager/src", "python/src"] {
        for (place, code) in product_code(folder) {
            let renames = [".rename(", "::rename(", "renameat", "hard_link(", "linkat"]
                .iter()
                .any(|word| code.contains(word));
            // The directories of a root in a store pass renames on, as entries. Those of a root on
            // several machines pass them to the main machine's.
            let may =
                ["core/src/io/", "manager/src/commit/", "manager/src/ledger/", "manager/src/machines/dir.rs"];
            let may = may.iter().any(|may| place.starts_with(may));
            assert!(!renames || may, "{place} renames: {code}");
        }
    }
    for (place, code) in python_code() {
        let renames = ["os.rename", "os.replace", "os.link", "shutil", ".rename("]
            .iter()
            .any(|word| code.contains(word));
        // A report goes to a file of the user's, whole. Probes remove their directory. A committed
        // checkpoint of a trainer takes the place of one that cannot be swapped with it.
        let may = ["_cli/report.py:", "_doctor_probes.py:", "integrations/_placing.py:"]
            .iter()
            .any(|may| place.strip_prefix("python/stepwell/").is_some_and(|name| name.starts_with(may)));
        assert!(!renames || may, "{place} renames: {code}");
    }
}

/// The modules of the package that open files outside of checkpoints: output that the user asked
/// for, events of a run, trials of a file system, and locks that the command line inspects.
const OTHER_FILES: [&str; 8] = [
    "python/stepwell/events.py:",
    "python/stepwell/_doctor_probes.py:",
    "python/stepwell/_run_measurements.py:",
    "python/stepwell/_cli/cat.py:",
    "python/stepwell/_cli/command.py:",
    "python/stepwell/_cli/report.py:",
    "python/stepwell/_cli/leftovers.py:",
    // Files of trainers are synced, and not read.
    "python/stepwell/integrations/_placing.py:",
];

/// The ways to a file that there are beside [`stepwell_core::io`].
const WAYS_TO_A_FILE: [&str; 12] = [
    "std::fs",
    "fs::File",
    "File::open(",
    "File::create(",
    "OpenOptions",
    "rustix::fs",
    "libc::open",
    "libc::creat",
    "openat",
    ".is_dir()",
    ".is_file()",
    ".exists()",
];

#[test]
fn nothing_outside_core_io_opens_a_data_file() {
    for folder in ["core/src", "reshard/src", "manager/src", "python/src"] {
        for (place, code) in product_code(folder) {
            if place.starts_with("core/src/io/") {
                continue;
            }
            if place.starts_with("core/src/sys/") {
                // It works on descriptors that it is given; what it opens itself is the kernel's
                // word on the machine.
                let opens = [
                    "read_to_string(",
                    "fs::read",
                    "File::open(",
                    "File::create(",
                    "OpenOptions",
                    "libc::open",
                ]
                .iter()
                .any(|word| code.contains(word));
                let is_kernel = ["\"/proc/", "\"/dev/", "\"/sys/"].iter().any(|below| code.contains(below))
                    // All of its files are below /sys/fs/cgroup, or below what a test puts in its
                    // place.
                    || place.starts_with("core/src/sys/control_group.rs:");
                assert!(!opens || is_kernel, "{place} opens a file: {code}");
                continue;
            }
            let way = WAYS_TO_A_FILE.iter().find(|word| code.contains(**word));
            assert!(way.is_none(), "{place} reaches files past core/io: {code}");
            // And through it, only the two pipelines ask for data files: the crates above have
            // small files, whole ones, and indexes, of which they read pages. A copy of a step
            // hands its files to the engine. Headers of foreign files are read in one module.
            let opens = [".open_file(", ".create_file("].iter().any(|word| code.contains(word));
            let may = [
                "core/src/load/",
                "core/src/save/",
                // For readers on other machines.
                "core/src/served/server.rs:",
                "manager/src/convert/",
                "manager/src/copy.rs:",
                "manager/src/foreign_reading.rs:",
                // The directories of a root in a store hand the engine's calls on.
                "manager/src/ledger/",
                "manager/src/machines/dir.rs:",
                "manager/src/stored_index.rs:",
            ];
            let may = may.iter().any(|may| place.starts_with(may));
            assert!(!opens || may, "{place} opens a data file: {code}");
        }
    }
    for (place, code) in python_code() {
        let calls_open = code.match_indices("open(").any(|(at, _)| {
            let before = code[..at].chars().next_back().unwrap_or(' ');
            // Its own `open` returns a checkpoint.
            let own = place.starts_with("python/stepwell/_opening.py") || code.contains("def open(");
            !own && !before.is_alphanumeric() && !matches!(before, '_' | '.')
        });
        let others = [
            "os.open",
            "io.open",
            ".fromfile(",
            "np.load(",
            "memmap(",
            "read_bytes()",
            "read_text()",
            "write_bytes(",
        ];
        let opens = calls_open || others.iter().any(|word| code.contains(word) && !code.contains("def "));
        let may = OTHER_FILES.iter().any(|other| place.starts_with(other));
        assert!(!opens || may, "{place} opens a file: {code}");
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
