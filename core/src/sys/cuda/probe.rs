//! Finds a usable CUDA driver, once per process.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;

use super::api::{Api, Code, SUCCESS};
use super::device::Device;
use crate::sys::Birth;
use crate::{Error, Result};

/// The oldest supported driver version. CUDA 10.1 has all required functions; nothing older was
/// tested.
const OLDEST: c_int = 11_000;

/// A working CUDA driver with all required functions.
pub struct Driver {
    pub(super) api: Api,
    /// 1000 × major + 10 × minor.
    version: c_int,
    /// Number of devices that this process sees.
    count: c_int,
    /// The opened devices. They are never released: the contexts belong to the frameworks, and the
    /// driver may be unloaded before the process ends.
    devices: Mutex<Vec<Arc<Device>>>,
    /// The process that initialised CUDA, which does not work in a forked child.
    birth: Birth,
}

/// Returns the driver. [`Error::NoDriver`] names the reason if none is usable: not installed, a
/// stub, too old, or no device. [`Error::Forked`] in a child of the process that called this first.
pub fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
    match DRIVER.get_or_init(probe) {
        Ok(driver) => driver.birth.check("CUDA driver").map(|()| driver),
        Err(reason) => Err(Error::NoDriver(reason.clone())),
    }
}

fn probe() -> Result<Driver, String> {
    let birth = Birth::now();
    // SAFETY: loads the driver library by its name. Its constructors are made to run in any
    // process.
    if !unsafe { sys::is_culib_present() } {
        return Err("there is no NVIDIA driver (libcuda.so.1 cannot be loaded)".to_owned());
    }
    // SAFETY: the library is present, and is the CUDA driver.
    let api = unsafe { Api::find() }.map_err(|missing| {
        format!("libcuda.so.1 has no function {missing}: it is a stub, or a driver older than CUDA 11")
    })?;
    // SAFETY: the first call of a driver.
    asked(&api, "cuInit", unsafe { (api.cuInit)(0) })?;
    let (mut version, mut count) = (0, 0);
    // SAFETY: each writes one number, which outlives the call.
    asked(&api, "cuDriverGetVersion", unsafe { (api.cuDriverGetVersion)(&raw mut version) })?;
    // SAFETY: as above.
    asked(&api, "cuDeviceGetCount", unsafe { (api.cuDeviceGetCount)(&raw mut count) })?;
    if version < OLDEST {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        return Err(format!("its driver is for CUDA {major}.{minor}; CUDA 11 is the oldest that is used"));
    }
    if count < 1 {
        return Err("there is a driver, and no device that this process may use".to_owned());
    }
    Ok(Driver { api, version, count, devices: Mutex::default(), birth })
}

fn asked(api: &Api, call: &str, code: Code) -> Result<(), String> {
    match code {
        SUCCESS => Ok(()),
        code => Err(format!("{call} answers {}", super::name_of(api, code))),
    }
}

impl Driver {
    /// Returns the version: 1000 × major + 10 × minor.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Number of devices that this process sees.
    pub fn count(&self) -> usize {
        usize::try_from(self.count).unwrap_or(0)
    }

    /// Returns a device by its number among those that this process sees.
    pub fn device(&'static self, ordinal: u32) -> Result<Arc<Device>> {
        self.birth.check("CUDA driver")?;
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.iter().find(|device| device.ordinal() == ordinal) {
            return Ok(Arc::clone(device));
        }
        let device = Device::open(&self.api, ordinal)?;
        devices.push(Arc::clone(&device));
        Ok(device)
    }
}
