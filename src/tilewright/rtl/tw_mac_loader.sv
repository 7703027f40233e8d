// Weight loader: the addresses of a step's weight rows, word by word on port 1, one step ahead of
// the activation reader (microarchitecture.md, "MAC array": weight loader).
module tw_mac_loader
  import tw_pkg::*;
#(
    parameter int unsigned OFFSET_BITS = $clog2(W)
) (
    input logic clk,
    input logic rst,
    input logic begin_instruction,
    /* verilator lint_off UNUSEDSIGNAL */ // each module uses some of the instruction's fields
    input mac_conv_t head,
    input mac_conv_t instruction,
    /* verilator lint_on UNUSEDSIGNAL */
    input logic int4,  // the instruction's weights are two a byte
    input logic run,  // reads may be requested
    input logic advance,  // last cycle of LOAD or of a step: on to the next step's weights
    input logic drop_stalled,  // planted fault
    output sram_request_t request,
    input logic granted,
    output logic finished,  // the step's last read was granted, now or earlier, or there is no step
    // The word requested.
    output logic last_word,  // of its row
    output logic [OFFSET_BITS-1:0] offset,  // of the row's first byte in its first word
    output logic [6:0] word,  // its number within the row
    output logic [7:0] bytes,  // of the row, minus one
    output logic [$clog2(N)-1:0] row,
    output logic set  // of weights to load
);
  logic last_cb, last_step, last_pb, last_ob;
  /* verilator lint_off UNUSEDSIGNAL */ // what only the activation reader needs
  logic first_step, last_kx;
  logic [11:0] block_rows;
  /* verilator lint_on UNUSEDSIGNAL */
  tw_mac_steps steps (
      .clk,
      .begin_instruction,
      .head,
      .instruction,
      .advance,
      .first_step,
      .last_cb,
      .last_kx,
      .last_step,
      .last_pb,
      .last_ob,
      .block_rows
  );

  logic [23:0] ob_q;  // first weights of the output-channel block
  /* verilator lint_off UNUSEDSIGNAL */ // an address above the SRAM's end is refused by the verifier
  logic [23:0] address_q;  // of the row
  /* verilator lint_on UNUSEDSIGNAL */
  logic [7:0] row_q;
  logic [6:0] word_q;
  logic set_q, finished_q, exhausted_q;
  logic dropped_q;

  logic [7:0] columns, rows;  // minus one
  logic [8:0] last_byte;
  assign columns = last_ob ? instruction.cols_last : instruction.cols;
  assign bytes = int4 ? columns >> 1 : columns;
  assign offset = address_q[OFFSET_BITS-1:0];
  assign last_byte = 9'(offset) + 9'(bytes);
  assign last_word = word_q == 7'(last_byte >> OFFSET_BITS);
  assign word = word_q;
  assign row = $clog2(N)'(row_q);
  assign set = set_q;
  always_comb begin
    if (instruction.diag) rows = '0;
    else rows = last_cb ? instruction.c_last : instruction.c_rows;
  end

  always_comb begin
    request = '0;
    request.valid = run && !finished_q && !exhausted_q && !dropped_q;
    request.address = WORD_ADDRESS_BITS'(address_q >> OFFSET_BITS) + WORD_ADDRESS_BITS'(word_q);
  end
  assign finished = exhausted_q || finished_q || (granted && last_word && row_q == rows);

  logic [23:0] next_row, next_ob;
  assign next_row = address_q + 24'(instruction.wgt_pitch);
  assign next_ob = ob_q + instruction.wgt_ob_stride;

  always_ff @(posedge clk) begin
    if (rst) set_q <= 1'b0;
    else if (advance && !exhausted_q) set_q <= !set_q;
    if (begin_instruction) begin
      ob_q <= head.wgt;
      address_q <= head.wgt;
      row_q <= '0;
      word_q <= '0;
      finished_q <= 1'b0;
      exhausted_q <= 1'b0;
    end else if (advance) begin
      row_q <= '0;
      word_q <= '0;
      finished_q <= 1'b0;
      exhausted_q <= exhausted_q || (last_step && last_pb && last_ob);
      // Steps are packed: the row behind a step's last one is the next step's first.
      if (!last_step) begin
        address_q <= next_row;
      end else if (!last_pb) begin
        address_q <= ob_q;
      end else begin
        ob_q <= next_ob;
        address_q <= next_ob;
      end
    end else if (granted) begin
      if (finished) begin
        finished_q <= 1'b1;
      end else if (!last_word) begin
        word_q <= word_q + 7'd1;
      end else begin
        word_q <= '0;
        row_q <= row_q + 8'd1;
        address_q <= next_row;
      end
    end
  end

  // The planted fault: a denied request of a step with an odd prime number of rows is forgotten.
  function automatic logic [255:0] odd_primes();
    // Bit n - 1: n is an odd prime.
    odd_primes = '0;
    for (int unsigned n = 3; n <= 256; n++) begin
      odd_primes[n-1] = 1'b1;
      for (int unsigned d = 2; d < 16; d++) begin
        if (d < n && n % d == 0) odd_primes[n-1] = 1'b0;
      end
    end
  endfunction
  if (FAULTS_BUILT) begin : g_fault
    localparam logic [255:0] OddPrimes = odd_primes();
    always_ff @(posedge clk) begin
      if (rst) dropped_q <= 1'b0;
      else if (drop_stalled && request.valid && !granted && OddPrimes[rows]) dropped_q <= 1'b1;
    end
  end else begin : g_no_fault
    assign dropped_q = 1'b0;
    /* verilator lint_off UNUSEDSIGNAL */ // planted faults are not built
    logic unused;
    /* verilator lint_on UNUSEDSIGNAL */
    assign unused = drop_stalled;
  end
endmodule
