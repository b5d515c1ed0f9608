//! Recorded work: a sequence of launches, submitted as one.

use std::collections::HashMap;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use crate::gpu::Stream;

/// Recordings by key.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    recorded: HashMap<u64, Graph>,
}

#[derive(Debug)]
struct Graph {
    exec: sys::CUgraphExec,
}

// SAFETY: a handle; one owner.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated in `Graphs::end`; the owner waits for its work first.
        let _ = unsafe { result::graph::exec_destroy(self.exec) };
    }
}

impl Graphs {
    pub(crate) fn has(&self, key: u64) -> bool {
        self.recorded.contains_key(&key)
    }

    /// Forgets all recordings. None may be running.
    pub(crate) fn clear(&mut self) {
        self.recorded.clear();
    }

    /// From here on, the stream records and runs nothing.
    pub(crate) fn begin(&self, stream: &Stream) -> Result<(), DriverError> {
        // Relaxed: the driver may load a kernel meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a live stream of this process.
        unsafe { result::stream::begin_capture(stream.0, mode) }
    }

    /// Keeps what was recorded since `begin`.
    pub(crate) fn end(&mut self, stream: &Stream, key: u64) -> Result<(), DriverError> {
        // SAFETY: the stream is recording; the graph is destroyed after it was instantiated.
        unsafe {
            let graph = result::stream::end_capture(stream.0)?;
            let exec = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            result::graph::destroy(graph)?;
            let exec = exec?;
            result::graph::upload(exec, stream.0)?;
            self.recorded.insert(key, Graph { exec });
        }
        Ok(())
    }

    /// Ends a recording that failed.
    pub(crate) fn abandon(&self, stream: &Stream) {
        // SAFETY: the stream is recording.
        if let Ok(graph) = unsafe { result::stream::end_capture(stream.0) }
            && !graph.is_null()
        {
            // SAFETY: ended above and used by nothing else.
            let _ = unsafe { result::graph::destroy(graph) };
        }
    }

    /// Submits a recording.
    pub(crate) fn launch(&self, stream: &Stream, key: u64) -> Result<(), DriverError> {
        match self.recorded.get(&key) {
            // SAFETY: instantiated in this context.
            Some(graph) => unsafe { result::graph::launch(graph.exec, stream.0) },
            None => Ok(()),
        }
    }
}
