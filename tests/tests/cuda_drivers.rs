//! Missing, broken and old CUDA drivers: the answer is clear, and nothing panics.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::Command;

use stepwell_core::sys::testing::absent;
use stepwell_tests::fake_cuda;

/// The output of a process that finds this directory first, with these variables.
fn probed(libraries: &Path, variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda_probe"));
    command.env("LD_LIBRARY_PATH", libraries).envs(variables.iter().copied());
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    said.trim_end().to_owned()
}

#[test]
fn a_driver_that_works_is_found_with_its_version_and_devices() {
    let there = fake_cuda::built(false);
    assert_eq!(probed(&there, &[]), "driver 13000 with 2 devices");
    assert_eq!(
        probed(&there, &[("FAKE_CUDA_DEVICES", "8"), ("FAKE_CUDA_VERSION", "12080")]),
        "driver 12080 with 8 devices"
    );
}

#[test]
fn unusable_driver_files_give_plain_answers() {
    let directory = tempfile::tempdir().unwrap();
    let none = probed(directory.path(), &[]);
    if none.starts_with("driver") {
        return absent("no-cuda-driver", &none);
    }
    assert!(none.starts_with("device: no CUDA device can be used: there is no NVIDIA driver"), "{none}");
    std::fs::write(directory.path().join("libcuda.so.1"), b"not a library").unwrap();
    assert!(probed(directory.path(), &[]).starts_with("device"), "a broken one");
    // A library of another kind under that name.
    let other = std::fs::read_dir("/lib/x86_64-linux-gnu").into_iter().flatten().flatten();
    let other = other.map(|entry| entry.path()).find(|path| path.to_string_lossy().contains("libz.so."));
    if let Some(other) = other {
        std::fs::copy(other, directory.path().join("libcuda.so.1")).unwrap();
        assert!(probed(directory.path(), &[]).contains("has no function cuInit"), "one of something else");
    }
}

#[test]
fn unusable_drivers_say_why() {
    let there = fake_cuda::built(false);
    let cases = [
        ("FAKE_CUDA", "stub", "cuInit answers CUDA_ERROR_STUB_LIBRARY (34)"),
        ("FAKE_CUDA", "no-device", "cuInit answers CUDA_ERROR_NO_DEVICE (100)"),
        ("FAKE_CUDA", "init-fails", "cuInit answers code 7777"),
        ("FAKE_CUDA_DEVICES", "0", "no device that this process may use"),
        ("FAKE_CUDA_VERSION", "10020", "its driver is for CUDA 10.2"),
    ];
    for (variable, value, said) in cases {
        let found = probed(&there, &[(variable, value)]);
        assert!(found.starts_with("device: ") && found.contains(said), "{value}: {found}");
    }
    let incomplete = probed(&fake_cuda::built(true), &[]);
    assert!(
        incomplete.contains("libcuda.so.1 has no function cuThreadExchangeStreamCaptureMode: it is a stub"),
        "{incomplete}"
    );
}
