//! CUDA: copies between device memory and host memory. Only this module calls the driver.
//!
//! | file | what it is |
//! |---|---|
//! | `api` | the functions that are called |
//! | `probe` | [`driver()`]: whether there is one that can be used, asked once |
//! | `device` | [`Device`]: context, streams, events |
//! | `registered` | host memory that the driver knows, so that copies run by themselves |
//! | `batch` | many copies to the host in one call |
//! | `arriving` | what is on its way into a [`super::Buffer`] |
//! | `source` | [`DeviceSource`]: an array on a device, to be saved |
//! | `target` | [`DeviceMemory`]: an array on a device, to be restored |
//!
//! Invariants:
//! * This module neither creates nor synchronises a context. It uses the frameworks' primary
//!   context, enters it for the length of a call and then restores the previous one.
//! * A buffer that a device copies into hides its bytes and cannot be moved on before the copies
//!   have ended. Their source stays allocated until then. A buffer whose copies never end is
//!   leaked.
//! * Memory is unregistered before it is unmapped.

mod api;
pub(in crate::sys) mod arriving;
mod batch;
mod device;
mod probe;
pub(in crate::sys) mod registered;
mod source;
mod target;

use std::ffi::{CStr, c_char};

use cudarc::driver::sys;

use api::{Api, Code, SUCCESS};
use device::{Entered, Stream};

pub use device::{Device, UserStream};
pub use probe::{Driver, driver};
pub use source::DeviceSource;
pub use target::{DeviceCopies, DeviceMemory};

use crate::Result;

/// The largest row pitch of the copy engines (`CU_DEVICE_ATTRIBUTE_MAX_PITCH` of every device so
/// far).
const MAX_PITCH: u64 = (1 << 31) - 1;

/// Returns the name of a return code.
fn name_of(api: &Api, code: Code) -> String {
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: writes one pointer: null, or a static string of the driver.
    let known = unsafe { (api.cuGetErrorName)(code, &raw mut name) } == SUCCESS && !name.is_null();
    if !known {
        return format!("code {code}");
    }
    // SAFETY: see above.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    format!("{name} ({code})")
}

/// Direction of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    FromDevice,
    ToDevice,
}

/// Rows of bytes, on both sides.
#[derive(Clone, Copy)]
struct Rows {
    host: *mut u8,
    device: u64,
    /// Bytes per row.
    width: usize,
    /// Number of rows.
    height: u64,
    /// Bytes from one row to the next.
    host_pitch: usize,
    device_pitch: i64,
}

/// Starts to copy rows. Uses one call if the rows are contiguous on both sides or the engine
/// supports their pitch, otherwise one call per row.
///
/// # Safety
/// All rows are in memory of that device, and in mapped host memory that nobody else touches. Both
/// hold until the current work on the stream has ended.
unsafe fn start(entered: &Entered<'_>, stream: Stream, direction: Direction, rows: Rows) -> Result<()> {
    let Rows { host, device, width, height, host_pitch, device_pitch } = rows;
    let one = |host: *mut u8, device: u64, bytes: usize| {
        // SAFETY: as promised by the caller, of these bytes.
        let (call, code) = unsafe {
            match direction {
                Direction::FromDevice => (
                    "cuMemcpyDtoHAsync",
                    (entered.api.cuMemcpyDtoHAsync_v2)(host.cast(), device, bytes, stream.0),
                ),
                Direction::ToDevice => (
                    "cuMemcpyHtoDAsync",
                    (entered.api.cuMemcpyHtoDAsync_v2)(device, host.cast(), bytes, stream.0),
                ),
            }
        };
        entered.device.check(call, code)
    };
    let dense = host_pitch == width && u64::try_from(device_pitch) == Ok(width as u64);
    if height == 1 || dense {
        return one(host, device, width * height as usize);
    }
    let pitch = u64::try_from(device_pitch).ok();
    let apart = pitch.filter(|&pitch| (width as u64..=MAX_PITCH).contains(&pitch));
    if let Some(pitch) = apart
        && (width..=MAX_PITCH as usize).contains(&host_pitch)
    {
        let out = direction == Direction::FromDevice;
        let memory = |host| {
            if host { sys::CUmemorytype::CU_MEMORYTYPE_HOST } else { sys::CUmemorytype::CU_MEMORYTYPE_DEVICE }
        };
        let (src_pitch, dst_pitch) =
            if out { (pitch as usize, host_pitch) } else { (host_pitch, pitch as usize) };
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: memory(!out),
            srcHost: host.cast_const().cast(),
            srcDevice: device,
            srcArray: std::ptr::null_mut(),
            srcPitch: src_pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: memory(out),
            dstHost: host.cast(),
            dstDevice: device,
            dstArray: std::ptr::null_mut(),
            dstPitch: dst_pitch,
            WidthInBytes: width,
            Height: height as usize,
        };
        // SAFETY: as promised by the caller. The description outlives the call, and the driver uses
        // only the addresses of the named memory types.
        let code = unsafe { (entered.api.cuMemcpy2DAsync_v2)(&raw const copy, stream.0) };
        return entered.device.check("cuMemcpy2DAsync", code);
    }
    for row in 0..height {
        let from = device.wrapping_add_signed(row.cast_signed().wrapping_mul(device_pitch));
        one(host.wrapping_add(row as usize * host_pitch), from, width)?;
    }
    Ok(())
}
