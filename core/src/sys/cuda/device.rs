//! One device: its primary context, which the frameworks share, and two streams for copies from and
//! to it.

use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use super::api::{Api, Code, NOT_READY, RawHandle, SUCCESS};
use crate::sys::Birth;
use crate::{Error, Result};

/// `CU_STREAM_NON_BLOCKING`: the stream and the default stream do not wait for each other.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`: events with timing synchronise more than needed.
const NO_TIMING: u32 = 2;
/// `CU_STREAM_PER_THREAD`: a name, not a handle.
const PER_THREAD: u64 = 2;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: graph captures of other threads forbid nothing to this one.
const RELAXED: c_int = 2;

/// A CUDA device. It is never destroyed: its context is shared and lives as long as the process.
pub struct Device {
    /// For values that outlive a call.
    me: Weak<Self>,
    api: &'static Api,
    ordinal: u32,
    name: String,
    context: RawHandle,
    /// Our streams for copies from and to the device, created on first use.
    leaving: OnceLock<Stream>,
    coming: OnceLock<Stream>,
    /// Unused events, for reuse.
    idle: Mutex<Vec<RawEvent>>,
    birth: Birth,
}

/// A stream of stepwell.
#[derive(Clone, Copy)]
pub(super) struct Stream(pub(super) RawHandle);

/// A stream of the caller, which copies are ordered with.
#[derive(Clone, Copy, Debug)]
pub struct UserStream(u64);

impl UserStream {
    /// Wraps a driver handle (a `CUstream`; 0 is the default stream). [`Error::Misuse`] for the
    /// per-thread default stream.
    ///
    /// # Safety
    /// It is a stream of the primary context of its device, and is not destroyed while it is used.
    pub unsafe fn new(handle: u64) -> Result<Self> {
        if handle == PER_THREAD {
            return Err(Error::Misuse(
                "the default stream of each thread (CU_STREAM_PER_THREAD) means another one here; pass a stream that was created".into(),
            ));
        }
        Ok(Self(handle))
    }

    fn stream(self) -> Stream {
        Stream(self.0 as RawHandle)
    }
}

struct RawEvent(RawHandle);

// SAFETY: any thread that has entered the context may use the driver's handles; `Entered` ensures
// that.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}
// SAFETY: as above.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}
// SAFETY: as above.
unsafe impl Send for RawEvent {}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{} ({})", self.ordinal, self.name)
    }
}

impl Device {
    pub(super) fn open(api: &'static Api, ordinal: u32) -> Result<Arc<Self>> {
        let fail = |call, code| failed(api, &format_args!("cuda:{ordinal}"), call, code);
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let mut device: c_int = 0;
        // SAFETY: writes one number.
        fail("cuDeviceGet", unsafe { (api.cuDeviceGet)(&raw mut device, number) })?;
        let mut name: [c_char; 96] = [0; 96];
        // SAFETY: writes at most this many bytes, including a zero.
        fail("cuDeviceGetName", unsafe { (api.cuDeviceGetName)(name.as_mut_ptr(), 96, device) })?;
        // SAFETY: it ends with a zero: the buffer was zeroed, and the driver terminates its string.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut context: RawHandle = ptr::null_mut();
        // SAFETY: writes one handle. The context is the one that the frameworks of this process
        // use. It is never released.
        fail("cuDevicePrimaryCtxRetain", unsafe {
            (api.cuDevicePrimaryCtxRetain)(&raw mut context, device)
        })?;
        Ok(Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            api,
            ordinal,
            name,
            context,
            leaving: OnceLock::new(),
            coming: OnceLock::new(),
            idle: Mutex::default(),
            birth: Birth::now(),
        }))
    }

    /// Returns the device's number among those that this process sees.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Returns the vendor's name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes the device's context current on this thread. Dropping the result restores the previous
    /// context.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        self.birth.check("CUDA device")?;
        // SAFETY: the context is never released.
        self.check("cuCtxPushCurrent", unsafe { (self.api.cuCtxPushCurrent_v2)(self.context) })?;
        let mut mode = RELAXED;
        // SAFETY: swaps one number of this thread. Dropping the result swaps it back.
        let code = unsafe { (self.api.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        let entered = Entered {
            device: self,
            api: self.api,
            mode: (code == SUCCESS).then_some(mode),
            here: PhantomData,
        };
        self.check("cuThreadExchangeStreamCaptureMode", code)?;
        Ok(entered)
    }

    /// Returns an error unless the code is success.
    pub(super) fn check(&self, call: &'static str, code: Code) -> Result<()> {
        failed(self.api, &format_args!("{self:?}"), call, code)
    }

    /// Returns the stream of copies from the device.
    pub(super) fn to_host(&self) -> Result<Stream> {
        self.stream(&self.leaving)
    }

    /// Returns the stream of copies to the device.
    pub(super) fn to_device(&self) -> Result<Stream> {
        self.stream(&self.coming)
    }

    fn stream(&self, place: &OnceLock<Stream>) -> Result<Stream> {
        if let Some(stream) = place.get() {
            return Ok(*stream);
        }
        let entered = self.enter()?;
        let mut stream: RawHandle = ptr::null_mut();
        // SAFETY: writes one handle, of the entered context. Priority 0 is the lowest.
        let code = unsafe { (entered.api.cuStreamCreateWithPriority)(&raw mut stream, NON_BLOCKING, 0) };
        self.check("cuStreamCreateWithPriority", code)?;
        // If another thread was faster, one stream stays unused.
        Ok(*place.get_or_init(|| Stream(stream)))
    }

    /// True if all work on one of our streams has ended. An error if the work failed.
    pub(super) fn is_idle(&self, stream: Stream) -> Result<bool> {
        let entered = self.enter()?;
        // SAFETY: a stream of this context.
        match unsafe { (entered.api.cuStreamQuery)(stream.0) } {
            NOT_READY => Ok(false),
            code => self.check("a copy", code).map(|()| true),
        }
    }

    /// Records an event after all current work of a stream.
    pub(super) fn mark(&self, stream: Stream) -> Result<Event> {
        let event = self.event()?;
        let entered = self.enter()?;
        // SAFETY: an event and a stream of the entered context. The stream is ours, or the caller
        // promises that it lives.
        let code = unsafe { (entered.api.cuEventRecord)(event.raw, stream.0) };
        self.check("cuEventRecord", code)?;
        Ok(event)
    }

    /// Makes future work on a stream wait for an event.
    pub(super) fn wait(&self, stream: Stream, event: &Event) -> Result<()> {
        let entered = self.enter()?;
        // SAFETY: as in `mark`. The wait refers to the event as recorded now; a later recording
        // does not affect it.
        let code = unsafe { (entered.api.cuStreamWaitEvent)(stream.0, event.raw, 0) };
        self.check("cuStreamWaitEvent", code)
    }

    fn event(&self) -> Result<Event> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let raw = if let Some(RawEvent(raw)) = idle {
            raw
        } else {
            let entered = self.enter()?;
            let mut raw: RawHandle = ptr::null_mut();
            // SAFETY: writes one handle.
            let code = unsafe { (entered.api.cuEventCreate)(&raw mut raw, NO_TIMING) };
            self.check("cuEventCreate", code)?;
            raw
        };
        // The caller holds an `Arc` of it.
        let device =
            self.me.upgrade().ok_or_else(|| Error::internal("a device that its caller holds", "none"))?;
        Ok(Event { device, raw })
    }

    /// Rejects a stream in graph capture: its work runs when the graph is replayed, not now.
    fn check_not_capturing(&self, stream: Stream) -> Result<()> {
        let entered = self.enter()?;
        let mut status: c_int = 0;
        // SAFETY: writes one number. The caller promises that the stream lives.
        let code = unsafe { (entered.api.cuStreamIsCapturing)(stream.0, &raw mut status) };
        self.check("cuStreamIsCapturing", code)?;
        if status == 0 {
            return Ok(());
        }
        Err(Error::Misuse(format!(
            "a CUDA graph is being captured on the current stream of cuda:{}: save, and guard updates, outside of the capture (a replayed graph runs no hooks: put the guard around the replay)",
            self.ordinal
        )))
    }
}

/// Returns an error unless the code is success.
fn failed(api: &Api, device: &dyn std::fmt::Display, call: &'static str, code: Code) -> Result<()> {
    match code {
        SUCCESS => Ok(()),
        code => Err(Error::Device { device: device.to_string(), call, answer: super::name_of(api, code) }),
    }
}

impl Device {
    /// Makes future copies to the device wait for the current work on the caller's stream.
    pub fn receive_after(&self, stream: UserStream) -> Result<()> {
        self.order(stream.stream(), stream.stream(), self.to_device()?)
    }

    /// Makes future work on the caller's stream wait for the copies to the device that have
    /// started.
    pub fn received_before(&self, stream: UserStream) -> Result<()> {
        self.order(stream.stream(), self.to_device()?, stream.stream())
    }

    /// Makes future copies from the device wait for the current work on the caller's stream.
    pub fn send_after(&self, stream: UserStream) -> Result<()> {
        self.order(stream.stream(), stream.stream(), self.to_host()?)
    }

    /// Makes future work on the caller's stream wait for the copies from the device that have
    /// started.
    pub fn sent_before(&self, stream: UserStream) -> Result<()> {
        self.order(stream.stream(), self.to_host()?, stream.stream())
    }

    /// Makes `second` wait for the current work on `first`. Fails if the caller's stream captures a
    /// graph.
    fn order(&self, callers: Stream, first: Stream, second: Stream) -> Result<()> {
        self.check_not_capturing(callers)?;
        let event = self.mark(first)?;
        self.wait(second, &event)
    }
}

/// A guard: the device's context is current on this thread.
pub(super) struct Entered<'a> {
    pub(super) device: &'a Device,
    pub(super) api: &'static Api,
    /// The thread's previous graph capture mode.
    mode: Option<c_int>,
    /// Not `Send`: the context is current on one thread.
    here: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(mode) = &mut self.mode {
            // SAFETY: as in `enter`.
            let _ = unsafe { (self.api.cuThreadExchangeStreamCaptureMode)(mode) };
        }
        let mut context: RawHandle = ptr::null_mut();
        // SAFETY: removes the context that `enter` has pushed.
        let code = unsafe { (self.api.cuCtxPopCurrent_v2)(&raw mut context) };
        if code != SUCCESS {
            tracing::warn!(device = ?self.device, code, "the thread's CUDA context was not given back");
        }
    }
}

/// A recorded point on a stream. Dropping it makes the driver event reusable.
pub(super) struct Event {
    device: Arc<Device>,
    raw: RawHandle,
}

// SAFETY: as `Device`.
unsafe impl Send for Event {}
// SAFETY: as `Device`.
unsafe impl Sync for Event {}

impl Event {
    /// True if the stream has reached it. An error if earlier work failed.
    pub(super) fn is_passed(&self) -> Result<bool> {
        let entered = self.device.enter()?;
        // SAFETY: an event of the entered context.
        match unsafe { (entered.api.cuEventQuery)(self.raw) } {
            NOT_READY => Ok(false),
            code => self.device.check("a copy", code).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.device.idle.lock().unwrap_or_else(PoisonError::into_inner).push(RawEvent(self.raw));
    }
}
