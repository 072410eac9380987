//! The CUDA driver functions that stepwell calls, all looked up at once.
//!
//! cudarc's own functions panic if the library or a symbol is missing. They also return an
//! enumeration, and a newer driver may return a value that it does not know. So this module uses
//! only cudarc's library and structures, and return codes are plain numbers.

use std::ffi::{c_char, c_int, c_uint, c_void};

use cudarc::driver::sys;

/// The return code of a call; 0 is success.
pub(super) type Code = u32;

pub(super) const SUCCESS: Code = 0;
pub(super) const NOT_READY: Code = 600;

/// An opaque driver handle: `CUcontext`, `CUstream` or `CUevent`.
pub(super) type RawHandle = *mut c_void;
/// A device address (`CUdeviceptr`).
pub(super) type Address = u64;

macro_rules! functions {
    (every { $($function:ident($($argument:ty),*);)* } newer { $($newer:ident($($of_newer:ty),*);)* }) => {
        /// One pointer per function.
        #[expect(non_snake_case, reason = "the driver's names")]
        pub(super) struct Api {
            $(pub(super) $function: unsafe extern "C" fn($($argument),*) -> Code,)*
            $(pub(super) $newer: Option<unsafe extern "C" fn($($of_newer),*) -> Code>,)*
        }

        impl Api {
            /// Looks up all functions. The error is the name of the first missing function that is
            /// required.
            ///
            /// # Safety
            /// The library is present and is a CUDA driver: functions of these names have these
            /// arguments.
            pub(super) unsafe fn find() -> Result<Self, &'static str> {
                // SAFETY: as promised by the caller. The library is never unloaded.
                let library = unsafe { sys::culib() };
                Ok(Self {
                    $($function: {
                        let name = concat!(stringify!($function), "\0").as_bytes();
                        // SAFETY: as promised by the caller; the library is never unloaded.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> Code>(name) };
                        *found.map_err(|_| stringify!($function))?
                    },)*
                    $($newer: {
                        let name = concat!(stringify!($newer), "\0").as_bytes();
                        // SAFETY: as above.
                        unsafe { library.get::<unsafe extern "C" fn($($of_newer),*) -> Code>(name) }.ok().map(|found| *found)
                    },)*
                })
            }
        }
    };
}

functions! {
    every {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut c_int, c_int);
        cuDeviceGetName(*mut c_char, c_int, c_int);
        cuDevicePrimaryCtxRetain(*mut RawHandle, c_int);
        cuCtxPushCurrent_v2(RawHandle);
        cuCtxPopCurrent_v2(*mut RawHandle);
        cuThreadExchangeStreamCaptureMode(*mut c_int);
        cuStreamCreateWithPriority(*mut RawHandle, c_uint, c_int);
        cuStreamQuery(RawHandle);
        cuStreamIsCapturing(RawHandle, *mut c_int);
        cuStreamWaitEvent(RawHandle, RawHandle, c_uint);
        cuEventCreate(*mut RawHandle, c_uint);
        cuEventRecord(RawHandle, RawHandle);
        cuEventQuery(RawHandle);
        cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        cuMemHostUnregister(*mut c_void);
        cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, RawHandle);
        cuMemcpyHtoDAsync_v2(Address, *const c_void, usize, RawHandle);
        cuMemcpy2DAsync_v2(*const sys::CUDA_MEMCPY2D, RawHandle);
        cuGetErrorName(Code, *mut *const c_char);
    }
    newer {
        cuMemcpyBatchAsync(*mut Address, *mut Address, *mut usize, usize, *mut sys::CUmemcpyAttributes, *mut usize, usize, *mut usize, RawHandle);
    }
}
