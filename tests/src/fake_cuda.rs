//! The fake CUDA driver of `tests/fake_cuda`, built, loaded and driven: devices, streams, arrays,
//! updates; what it found.
//!
//! It is loaded before stepwell looks for a driver, under the name that stepwell looks for. One
//! driver serves a process, so a test takes it for itself ([`FakeCuda::alone`]).
#![expect(unsafe_code, reason = "calls a library that is written in C, of which only tests know")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    reason = "tests end by them"
)]

use std::ffi::{CString, c_char, c_int, c_long, c_uint, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::{Library, Symbol};
use stepwell_core::provider::{CaptureTiming, DeviceProvider};
use stepwell_core::sys::{Device, DeviceMemory, DeviceSource, UserStream, driver};

/// The driver, as long as nobody else has it. Dropping it checks that nothing is left, and that
/// nothing was found.
pub struct FakeCuda {
    library: &'static Library,
    _alone: MutexGuard<'static, ()>,
    /// True if violations are expected.
    forgiven: Mutex<bool>,
}

/// Builds the driver (`incomplete`: without one of its functions) and gives the directory that it
/// is in.
pub fn built(incomplete: bool) -> PathBuf {
    let sources = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fake_cuda"));
    let into =
        sources.join("../../target").join(if incomplete { "fake_cuda_incomplete" } else { "fake_cuda" });
    let mut build = Command::new(sources.join("build.sh"));
    build.arg(&into);
    if incomplete {
        build.arg("incomplete");
    }
    assert!(build.status().expect("sh").success(), "the fake driver does not compile");
    into
}

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let path = built(false).join("libcuda.so.1");
        // SAFETY: the library was just built from the sources beside this; it does nothing when it
        // is loaded.
        unsafe { Library::new(&path) }.expect("the fake driver loads")
    })
}

macro_rules! call {
    ($library:expr, $name:ident, ($($type:ty),*) -> $answer:ty, $($value:expr),*) => {{
        // SAFETY: a function of the fake driver with these arguments (see fakecuda.h and
        // libcuda.c), whose pointers outlive the call.
        unsafe {
            let function: Symbol<'_, unsafe extern "C" fn($($type),*) -> $answer> =
                $library.get(concat!(stringify!($name), "\0").as_bytes()).expect(stringify!($name));
            function($($value),*)
        }
    }};
}

/// How a call fails.
#[derive(Clone, Copy, Debug)]
pub enum How {
    /// This time.
    Once = 0,
    /// From then on.
    Always = 1,
    /// From then on, and every other call with it: the context is lost.
    Sticky = 2,
}

impl FakeCuda {
    /// Takes the driver, with no failure to come and no delay.
    pub fn alone() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let fake = Self { library: library(), _alone: alone, forgiven: Mutex::new(false) };
        fake.heal();
        fake.random(1, 0);
        let _ = fake.violations();
        let name = driver().expect("the fake driver").device(0).expect("a fake device").name().to_owned();
        assert!(name.starts_with("Fake GPU"), "another driver was loaded: {name}");
        fake
    }

    /// A device.
    pub fn device(&self, ordinal: u32) -> Arc<Device> {
        driver().unwrap().device(ordinal).unwrap()
    }

    /// Does something with a device's context.
    fn within<T>(&self, device: u32, work: impl FnOnce() -> T) -> T {
        let mut context: *mut c_void = std::ptr::null_mut();
        let device = device.cast_signed();
        let code = call!(self.library, cuDevicePrimaryCtxRetain, (*mut *mut c_void, c_int) -> c_int, &raw mut context, device);
        assert_eq!(code, 0);
        assert_eq!(call!(self.library, cuCtxPushCurrent_v2, (*mut c_void) -> c_int, context), 0);
        let answer = work();
        call!(self.library, cuCtxPopCurrent_v2, (*mut *mut c_void) -> c_int, &raw mut context);
        answer
    }

    /// A stream of a training's.
    pub fn stream(&self, device: u32) -> Stream {
        let mut handle: *mut c_void = std::ptr::null_mut();
        let code = self.within(device, || {
            call!(self.library, cuStreamCreateWithPriority, (*mut *mut c_void, c_uint, c_int) -> c_int, &raw mut handle, 1, 0)
        });
        assert_eq!(code, 0);
        Stream { handle: handle as u64, device, library: self.library }
    }

    /// Memory on a device.
    pub fn array(&self, device: u32, bytes: usize) -> Arc<Array> {
        let mut address = 0_u64;
        let code = self.within(
            device,
            || call!(self.library, cuMemAlloc_v2, (*mut u64, usize) -> c_int, &raw mut address, bytes),
        );
        assert_eq!(code, 0);
        Arc::new(Array { address, bytes, device, library: self.library })
    }

    /// The bytes of an update: `bytes` from `from` on, of a version.
    pub fn pattern(&self, from: u64, bytes: usize, version: u64) -> Vec<u8> {
        let mut out = vec![0; bytes];
        call!(self.library, fakecuda_pattern, (*mut u8, u64, usize, u64) -> (), out.as_mut_ptr(), from, bytes, version);
        out
    }

    /// Order and delays from here on.
    pub fn random(&self, seed: u64, delay_us: i64) {
        call!(self.library, fakecuda_random, (u64, c_long) -> (), seed, delay_us);
    }

    /// The `nth` call of a function from now on fails; `copy` is a copy that runs.
    pub fn fail(&self, name: &str, nth: i64, code: i32, how: How) {
        let name = CString::new(name).unwrap();
        call!(self.library, fakecuda_fail, (*const c_char, c_long, c_int, c_int) -> (), name.as_ptr(), nth, code, how as c_int);
    }

    /// How often a function was called.
    pub fn calls(&self, name: &str) -> i64 {
        let name = CString::new(name).unwrap();
        call!(self.library, fakecuda_calls, (*const c_char) -> c_long, name.as_ptr())
    }

    /// Nothing runs any more, or it does again.
    pub fn stall(&self, on: bool) {
        call!(self.library, fakecuda_stall, (c_int) -> (), c_int::from(on));
    }

    /// No failure is left, nor one to come.
    pub fn heal(&self) {
        call!(self.library, fakecuda_heal, () -> (),);
    }

    /// Operations that have not run.
    pub fn pending(&self) -> i64 {
        call!(self.library, fakecuda_pending, () -> c_long,)
    }

    /// Bytes of host memory that are registered.
    pub fn registered(&self) -> usize {
        call!(self.library, fakecuda_registered, () -> usize,)
    }

    /// Returns the violations, line by line, and clears them.
    pub fn violations(&self) -> Vec<String> {
        let mut out = vec![0_u8; 1 << 16];
        let len = call!(self.library, fakecuda_violations, (*mut c_char, usize) -> usize, out.as_mut_ptr().cast(), out.len());
        out.truncate(len);
        String::from_utf8_lossy(&out).lines().map(str::to_owned).collect()
    }

    /// Accepts violations in this test.
    pub fn forgive(&self) {
        *self.forgiven.lock().unwrap() = true;
    }
}

impl Drop for FakeCuda {
    fn drop(&mut self) {
        self.heal();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while self.pending() > 0 {
            assert!(
                std::thread::panicking() || std::time::Instant::now() < deadline,
                "the devices do not come to an end"
            );
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let found = self.violations();
        if !*self.forgiven.get_mut().unwrap() && !std::thread::panicking() {
            assert!(found.is_empty(), "the driver saw what must not be:\n{}", found.join("\n"));
        }
    }
}

/// A stream on which a training computes.
pub struct Stream {
    handle: u64,
    device: u32,
    library: &'static Library,
}

impl Stream {
    /// As stepwell takes it.
    pub fn user(&self) -> UserStream {
        // SAFETY: a stream of the fake driver; it is destroyed with this value, whose users have
        // returned by then.
        unsafe { UserStream::new(self.handle) }.unwrap()
    }

    /// The number of its device.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Puts an update of all of an array on it.
    pub fn update(&self, array: &Array, version: u64) {
        let code = call!(self.library, fakecuda_update, (*mut c_void, u64, usize, u64) -> c_int, self.handle as *mut c_void, array.address, array.bytes, version);
        assert_eq!(code, 0);
    }

    /// A graph is being captured on it, or no more.
    pub fn capturing(&self, on: bool) {
        call!(self.library, fakecuda_capturing, (*mut c_void, c_int) -> (), self.handle as *mut c_void, c_int::from(on));
    }

    /// Waits until all that is on it has run.
    pub fn synchronize(&self) {
        call!(self.library, cuStreamSynchronize, (*mut c_void) -> c_int, self.handle as *mut c_void);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        call!(self.library, cuStreamDestroy_v2, (*mut c_void) -> c_int, self.handle as *mut c_void);
    }
}

/// Memory on a device, freed when nobody holds it.
pub struct Array {
    address: u64,
    bytes: usize,
    device: u32,
    library: &'static Library,
}

impl Array {
    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its device.
    pub fn device(&self) -> Arc<Device> {
        driver().unwrap().device(self.device).unwrap()
    }

    /// Returns its current content, outside of all streams.
    pub fn peek(&self) -> Vec<u8> {
        let mut out = vec![0; self.bytes];
        call!(self.library, fakecuda_peek, (u64, *mut u8, usize) -> (), self.address, out.as_mut_ptr(), self.bytes);
        out
    }

    /// Puts these bytes into it, now and past all streams.
    pub fn poke(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes);
        call!(self.library, fakecuda_poke, (u64, *const u8, usize) -> (), self.address, bytes.as_ptr(), bytes.len());
    }

    /// A view of it, to be saved: the element at index zero is `first` bytes from its start.
    pub fn source(
        self: &Arc<Self>,
        first: u64,
        itemsize: usize,
        shape: &[u64],
        strides: &[i64],
    ) -> DeviceSource {
        let owner = Arc::clone(self);
        // SAFETY: the callers' views are inside the array, which the owner keeps alive.
        unsafe { DeviceSource::new(self.device(), self.address + first, itemsize, shape, strides, owner) }
            .unwrap()
    }

    /// All of it as bytes, to be saved.
    pub fn provider(self: &Arc<Self>, timing: CaptureTiming) -> Arc<DeviceProvider> {
        Arc::new(DeviceProvider::new(self.source(0, 1, &[self.bytes as u64], &[1]), timing))
    }

    /// All of it, to be restored.
    pub fn target(self: &Arc<Self>) -> Arc<DeviceMemory> {
        let owner = Arc::clone(self);
        // SAFETY: the array is so long, and the owner keeps it.
        Arc::new(unsafe { DeviceMemory::new(self.device(), self.address, self.bytes as u64, owner) })
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        call!(self.library, cuMemFree_v2, (u64) -> c_int, self.address);
    }
}
