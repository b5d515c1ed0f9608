//! Recorded work: a sequence of launches, submitted as one.

use std::collections::HashMap;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use crate::gpu::{Event, Stream};

/// Recordings by key.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    recorded: HashMap<u64, Graph>,
}

#[derive(Debug)]
struct Graph {
    exec: sys::CUgraphExec,
    holds: Recording,
}

/// What lies in a recording beside ops.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    /// Kernels.
    pub(crate) launches: u64,
    /// Copies that it publishes.
    pub(crate) published: u32,
    /// Time stamps.
    pub(crate) stamps: Vec<Event>,
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
    /// What a recording holds, if there is one.
    pub(crate) fn get(&self, key: u64) -> Option<&Recording> {
        self.recorded.get(&key).map(|graph| &graph.holds)
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
    pub(crate) fn end(
        &mut self,
        stream: &Stream,
        key: u64,
        holds: Recording,
    ) -> Result<(), DriverError> {
        // SAFETY: the stream is recording; the graph is destroyed after it was instantiated.
        unsafe {
            let graph = result::stream::end_capture(stream.0)?;
            let exec = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            result::graph::destroy(graph)?;
            let exec = exec?;
            result::graph::upload(exec, stream.0)?;
            self.recorded.insert(key, Graph { exec, holds });
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
