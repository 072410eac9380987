//! One device: its primary context, which is the frameworks' too, and our two queues of copies, out
//! of it and into it.

use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use super::api::{Api, Code, Handle, NOT_READY, SUCCESS};
use super::probe::Driver;
use crate::staging::CopyQueue;
use crate::sys::Birth;
use crate::{Error, Result};

/// `CU_STREAM_NON_BLOCKING`: it does not wait for the default stream, nor that for it.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`: others synchronise more than they need.
const NO_TIMING: u32 = 2;
/// `CU_STREAM_PER_THREAD`: a name, and no handle.
const PER_THREAD: u64 = 2;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: a graph that some thread captures forbids nothing to this one.
const RELAXED: c_int = 2;

/// See the module documentation. It is never taken apart: the context is shared, and lives as long
/// as the process.
pub struct Device {
    /// For what outlives a call.
    me: Weak<Self>,
    api: &'static Api,
    ordinal: u32,
    name: String,
    context: Handle,
    /// Our queues of copies out of it and into it, made when first needed.
    leaving: OnceLock<Stream>,
    coming: OnceLock<Stream>,
    /// Events that nobody uses.
    idle: Mutex<Vec<RawEvent>>,
    birth: Birth,
}

/// A stream of ours.
#[derive(Clone, Copy)]
pub(super) struct Stream(pub(super) Handle);

/// A stream of the caller's, on which the work is that copies are ordered with.
#[derive(Clone, Copy, Debug)]
pub struct UserStream(u64);

impl UserStream {
    /// A stream by the driver's handle (a `CUstream`; 0 is the default stream). [`Error::Misuse`]
    /// for the one that each thread has for itself.
    ///
    /// # Safety
    /// It is a stream of the primary context of the device that it is used with, and is not
    /// destroyed meanwhile.
    pub unsafe fn new(handle: u64) -> Result<Self> {
        if handle == PER_THREAD {
            return Err(Error::Misuse(
                "the default stream of each thread (CU_STREAM_PER_THREAD) means another one here; pass a stream that was created".into(),
            ));
        }
        Ok(Self(handle))
    }

    fn stream(self) -> Stream {
        Stream(self.0 as Handle)
    }
}

struct RawEvent(Handle);

// SAFETY: the driver's handles may be used from any thread in whose context they are; `Entered`
// sees to that.
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
    pub(super) fn open(driver: &'static Driver, ordinal: u32) -> Result<Arc<Self>> {
        let api = &driver.api;
        let fail = |call, code| failed(api, &format_args!("cuda:{ordinal}"), call, code);
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let mut device: c_int = 0;
        // SAFETY: writes one number.
        fail("cuDeviceGet", unsafe { (api.cuDeviceGet)(&raw mut device, number) })?;
        let mut name: [c_char; 96] = [0; 96];
        // SAFETY: writes at most so many bytes, a zero among them.
        fail("cuDeviceGetName", unsafe { (api.cuDeviceGetName)(name.as_mut_ptr(), 96, device) })?;
        // SAFETY: it ends with a zero: the last byte was one before, and is written as nothing
        // else.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut context: Handle = ptr::null_mut();
        // SAFETY: writes one handle. The context is the one that the frameworks of this process
        // use; it is retained for good.
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

    /// Its number among those that this process sees.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The maker's name for it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes its context the current one of this thread. Dropping the answer restores the context
    /// that was current before.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        self.birth.check("CUDA device")?;
        // SAFETY: the context is retained for good.
        self.check("cuCtxPushCurrent", unsafe { (self.api.cuCtxPushCurrent_v2)(self.context) })?;
        let mut mode = RELAXED;
        // SAFETY: swaps one number of this thread's, which is swapped back when the answer is
        // dropped.
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

    /// The error for an answer that is none of success.
    pub(super) fn check(&self, call: &'static str, code: Code) -> Result<()> {
        failed(self.api, &format_args!("{self:?}"), call, code)
    }

    /// The queue of copies out of it.
    pub(super) fn to_host(&self) -> Result<Stream> {
        self.stream(&self.leaving)
    }

    /// The queue of copies into it.
    pub(super) fn to_device(&self) -> Result<Stream> {
        self.stream(&self.coming)
    }

    fn stream(&self, place: &OnceLock<Stream>) -> Result<Stream> {
        if let Some(stream) = place.get() {
            return Ok(*stream);
        }
        let entered = self.enter()?;
        let mut stream: Handle = ptr::null_mut();
        // SAFETY: writes one handle, of the context that was entered. Least urgent: 0 is the lowest
        // priority that there is.
        let code = unsafe { (entered.api.cuStreamCreateWithPriority)(&raw mut stream, NON_BLOCKING, 0) };
        self.check("cuStreamCreateWithPriority", code)?;
        // If another thread was faster, one stream stays unused.
        Ok(*place.get_or_init(|| Stream(stream)))
    }

    /// True if everything that was put on one of our streams has ended; an error if it has, badly.
    pub(super) fn is_idle(&self, stream: Stream) -> Result<bool> {
        let entered = self.enter()?;
        // SAFETY: a stream of this context.
        match unsafe { (entered.api.cuStreamQuery)(stream.0) } {
            NOT_READY => Ok(false),
            code => self.check("a copy", code).map(|()| true),
        }
    }

    /// An event behind everything that is on a stream now.
    pub(super) fn mark(&self, stream: Stream) -> Result<Event> {
        let event = self.event()?;
        let entered = self.enter()?;
        // SAFETY: an event and a stream, ours or the caller's (who says that it lives), of the
        // context that was entered.
        let code = unsafe { (entered.api.cuEventRecord)(event.raw, stream.0) };
        self.check("cuEventRecord", code)?;
        Ok(event)
    }

    /// Makes what is put on a stream from now on wait for an event.
    pub(super) fn wait(&self, stream: Stream, event: &Event) -> Result<()> {
        let entered = self.enter()?;
        // SAFETY: as in `mark`. What is waited for is the event as it was recorded, whatever
        // becomes of it later.
        let code = unsafe { (entered.api.cuStreamWaitEvent)(stream.0, event.raw, 0) };
        self.check("cuStreamWaitEvent", code)
    }

    fn event(&self) -> Result<Event> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let raw = if let Some(RawEvent(raw)) = idle {
            raw
        } else {
            let entered = self.enter()?;
            let mut raw: Handle = ptr::null_mut();
            // SAFETY: writes one handle.
            let code = unsafe { (entered.api.cuEventCreate)(&raw mut raw, NO_TIMING) };
            self.check("cuEventCreate", code)?;
            raw
        };
        // The caller holds it.
        let device =
            self.me.upgrade().ok_or_else(|| Error::internal("a device that its caller holds", "none"))?;
        Ok(Event { device, raw })
    }

    /// Refuses a stream on which a graph is being captured: what is put there runs when the graph
    /// is replayed, not now.
    fn check_not_capturing(&self, stream: Stream) -> Result<()> {
        let entered = self.enter()?;
        let mut status: c_int = 0;
        // SAFETY: writes one number; the stream is the caller's, who says that it lives.
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

/// The error for an answer that is none of success.
fn failed(api: &Api, device: &dyn std::fmt::Display, call: &'static str, code: Code) -> Result<()> {
    match code {
        SUCCESS => Ok(()),
        code => Err(Error::Device { device: device.to_string(), call, answer: super::name_of(api, code) }),
    }
}

impl Device {
    /// The handle of the stream on which copies out of it are made: for a library that has one of
    /// its arrays wait on it, or rather it for the array.
    pub fn copy_stream(&self) -> Result<u64> {
        Ok(self.to_host()?.0 as u64)
    }

    /// Makes copies into it that are started from now on wait for what is on the caller's stream
    /// now.
    pub fn receive_after(&self, stream: UserStream) -> Result<()> {
        self.order(stream.stream(), stream.stream(), self.to_device()?)
    }

    /// Makes what comes on the caller's stream wait for copies into it that have been started.
    pub fn received_before(&self, stream: UserStream) -> Result<()> {
        self.order(stream.stream(), self.to_device()?, stream.stream())
    }

    /// Makes `second` wait for what is on `first` now, where a graph is not being captured on the
    /// caller's.
    fn order(&self, callers: Stream, first: Stream, second: Stream) -> Result<()> {
        self.check_not_capturing(callers)?;
        let event = self.mark(first)?;
        self.wait(second, &event)
    }
}

impl CopyQueue for Device {
    fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn follow(&self, stream: UserStream) -> Result<()> {
        self.order(stream.stream(), stream.stream(), self.to_host()?)
    }

    fn precede(&self, stream: UserStream) -> Result<()> {
        self.order(stream.stream(), self.to_host()?, stream.stream())
    }
}

/// The device's context is this thread's.
pub(super) struct Entered<'a> {
    pub(super) device: &'a Device,
    pub(super) api: &'static Api,
    /// How graph captures of other threads concern this one, outside.
    mode: Option<c_int>,
    /// A thread's context is that thread's.
    here: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(mode) = &mut self.mode {
            // SAFETY: as in `enter`.
            let _ = unsafe { (self.api.cuThreadExchangeStreamCaptureMode)(mode) };
        }
        let mut context: Handle = ptr::null_mut();
        // SAFETY: takes back what `enter` has put there.
        let code = unsafe { (self.api.cuCtxPopCurrent_v2)(&raw mut context) };
        if code != SUCCESS {
            tracing::warn!(device = ?self.device, code, "the thread's CUDA context was not given back");
        }
    }
}

/// A point on a stream. When it is dropped, another point may be marked with it.
pub(super) struct Event {
    device: Arc<Device>,
    raw: Handle,
}

// SAFETY: as `Device`.
unsafe impl Send for Event {}
// SAFETY: as `Device`.
unsafe impl Sync for Event {}

impl Event {
    /// True if it has been reached; an error if what was before it failed.
    pub(super) fn is_passed(&self) -> Result<bool> {
        let entered = self.device.enter()?;
        // SAFETY: an event of the context that was entered.
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
