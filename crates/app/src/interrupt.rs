//! Ctrl-C: stops an answer, not the program.
//!
//! The first signal sets a flag that the answer's loop and the engine's prefill look at. A second
//! one while the first is still unanswered ends the program at once, so that a hang can be left.

use std::sync::atomic::{AtomicBool, Ordering};

/// Set by Ctrl-C, cleared by [`answering`].
static INTERRUPTED: AtomicBool = AtomicBool::new(false);
/// Whether an answer is being made, so that Ctrl-C has something to stop.
static ANSWERING: AtomicBool = AtomicBool::new(false);

/// The exit status of programs ended by Ctrl-C.
pub const EXIT_STATUS: u8 = 130;

/// Runs `work` with Ctrl-C stopping it: the flag it gets becomes true. Outside, Ctrl-C ends the
/// program as usual.
pub fn answering<T>(work: impl FnOnce(&AtomicBool) -> T) -> T {
    INTERRUPTED.store(false, Ordering::SeqCst);
    ANSWERING.store(true, Ordering::SeqCst);
    let result = work(&INTERRUPTED);
    ANSWERING.store(false, Ordering::SeqCst);
    result
}

/// Installs the handler. Where there are no signals, Ctrl-C keeps ending the program.
#[cfg(unix)]
pub fn install() {
    let handler: extern "C" fn(libc::c_int) = on_signal;
    // SAFETY: the action is fully initialised (a zeroed sigaction is a valid value) and the handler
    // does nothing but atomics and _exit, both allowed in a signal handler.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGINT, &raw const action, std::ptr::null_mut());
    }
}

/// Installs the handler. Where there are no signals, Ctrl-C keeps ending the program.
#[cfg(not(unix))]
pub fn install() {}

#[cfg(unix)]
extern "C" fn on_signal(_signal: libc::c_int) {
    if !ANSWERING.load(Ordering::SeqCst) || INTERRUPTED.swap(true, Ordering::SeqCst) {
        // SAFETY: _exit is async-signal-safe.
        unsafe { libc::_exit(libc::c_int::from(EXIT_STATUS)) }
    }
}
