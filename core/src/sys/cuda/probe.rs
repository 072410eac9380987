//! True if there is a CUDA driver that can be used: asked once.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;

use super::api::{Api, Code, SUCCESS};
use super::device::Device;
use crate::sys::Birth;
use crate::{Error, Result};

/// The oldest driver whose functions are called here (CUDA 10.1 has them all; nothing older was
/// tried).
const OLDEST: c_int = 11_000;

/// A CUDA driver that answers, and has every function that is needed.
pub struct Driver {
    pub(super) api: Api,
    /// 1000 × major + 10 × minor.
    version: c_int,
    /// How many devices this process sees.
    count: c_int,
    /// Those that were asked for: never given back, since the contexts are those of the frameworks,
    /// and the driver may be gone before this process is.
    devices: Mutex<Vec<Arc<Device>>>,
    /// CUDA does not work in a forked child.
    birth: Birth,
}

/// The driver. [`Error::NoDriver`] says why there is none: not installed, a stub, one too old, one
/// that finds no device. [`Error::Forked`] in a child of the process that asked first.
pub fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
    match DRIVER.get_or_init(probe) {
        Ok(driver) => driver.birth.check("CUDA driver").map(|()| driver),
        Err(reason) => Err(Error::NoDriver(reason.clone())),
    }
}

fn probe() -> Result<Driver, String> {
    let birth = Birth::now();
    // SAFETY: loads a library by its name, as every user of CUDA does; whatever its constructors
    // do, the driver's are made for that.
    if !unsafe { sys::is_culib_present() } {
        return Err("there is no NVIDIA driver (libcuda.so.1 cannot be loaded)".to_owned());
    }
    // SAFETY: it is there, and called as the driver is.
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
    /// Its version: 1000 × major + 10 × minor.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// How many devices this process sees.
    pub fn count(&self) -> usize {
        usize::try_from(self.count).unwrap_or(0)
    }

    /// A device by its number among those that this process sees.
    pub fn device(&'static self, ordinal: u32) -> Result<Arc<Device>> {
        self.birth.check("CUDA driver")?;
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.iter().find(|device| device.ordinal() == ordinal) {
            return Ok(Arc::clone(device));
        }
        let device = Device::open(self, ordinal)?;
        devices.push(Arc::clone(&device));
        Ok(device)
    }
}
